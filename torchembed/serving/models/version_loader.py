"""Loading of versions: checked, their rows in the levels, and warm."""

import contextlib
import logging
import threading
from collections.abc import Mapping
from pathlib import Path

from torchembed.checkpoints import RowSource
from torchembed.checkpoints.rows.row_folder import INDEX
from torchembed.serving.levels import LeveledLookup, ServedTable
from torchembed.serving.models.description import DeployedTable, ModelDescription
from torchembed.serving.models.dynamic_batcher import BatchTally, DynamicBatcher
from torchembed.serving.models.errors import ModelFolderError
from torchembed.serving.models.loaded_version import LoadedVersion
from torchembed.serving.models.memory_needs import check_needs, memory_needs
from torchembed.serving.models.model_folder import (
    TABLES_FOLDER,
    check_files,
    num_hugectr_rows,
    open_hugectr_table,
    open_table,
    read_description,
    version_folder,
)
from torchembed.serving.models.model_options import ModelOptions
from torchembed.serving.models.row_loading import RowLoader, RowsOf
from torchembed.serving.models.shared_lookups import SharedLookups
from torchembed.serving.models.version_lease import VersionLease
from torchembed.stores import RowStoreError

_logger = logging.getLogger(__name__)


class VersionLoader:
    """Loads versions out of a folder of models; any number of threads at once.

    Args:
        folder: of all models.
        rows: loads their rows.
        max_bytes: of memory that rows and dense parts of loaded versions may take; None for no
            limit.
    """

    def __init__(self, folder: Path, rows: RowLoader, max_bytes: int | None) -> None:
        self.folder, self.rows, self.lookups = folder, rows, SharedLookups()
        self.is_closing = False
        """Whether rows of versions that are let go of stay in the stores."""
        self._max_bytes = max_bytes
        self._held: dict[object, dict[str, int]] = {}
        """The bytes of each loaded version: by the names of its tables in stores, and of its dense
        part."""
        self._left: dict[str, int] = {}
        """The bytes of tables whose rows stayed in the stores when their versions were let go of,
        by the names of these tables in the stores."""
        self._tallies: dict[str, BatchTally] = {}
        self._lock = threading.Lock()

    def load(self, name: str, number: int, options: ModelOptions) -> VersionLease:
        """Load a version with all its rows, and have it answer made-up requests.

        Raises:
            ModelFolderError: where the folder is not as it was written.
            OutOfMemoryBudgetError: where the version needs more memory than is left.
            ValueError: where its tables are not as those of one name that are loaded, or the
                options do not fit it.
            RowStoreError, OSError: where rows cannot be stored.
        """
        folder = version_folder(self.folder, name, number)
        description = read_description(folder)
        if (description.name, description.version) != (name, number):
            raise ModelFolderError(
                f"{folder} must hold version {number} of {name}, and holds version "
                f"{description.version} of {description.name}; move it where it was deployed"
            )
        tables = served_tables(description, options)
        needs = memory_needs(
            description, dict(tables.values()), options.row_bytes, options.captured_sizes
        )
        token = object()
        with self._lock:
            held = dict(self._left)
            for of_one in self._held.values():
                held |= of_one
            what = f"version {number} of model {name}"
            check_needs(what, needs, held, self._max_bytes)
            of_version = needs.dense + needs.captured
            self._held[token] = {**needs.tables, f"{what}, dense part": of_version}

        with contextlib.ExitStack() as releasing:
            releasing.callback(self._forget, token, {} if options.rows_by_version else needs.tables)
            check_files(folder, description)
            releasing.callback(self.lookups.release, token)
            lookups = self.lookups.take(token, dict(tables.values()), options.make_lookup)
            if options.rows_by_version:
                for served, _ in tables.values():
                    rows = RowsOf(name, served.name)
                    releasing.callback(self._drop, token, rows, lookups[served.name])
            version = LoadedVersion(
                folder,
                description,
                {table: lookups[served.name] for table, (served, _) in tables.items()},
                {table: served.name for table, (served, _) in tables.items()},
                options.device,
                options.captured_sizes,
            )
            # Before any row is written: by those that versions share the current one answers.
            version.try_dense_part()
            self._load_rows(folder, description, tables, lookups, options)
            version.warm()
            answering = version
            if options.batching is not None:
                batcher = DynamicBatcher(version, options.batching, self.tally(name))
                answering = releasing.enter_context(batcher)
            return VersionLease(version, answering, releasing.pop_all().close)

    def tally(self, name: str) -> BatchTally:
        """The tally of all batches of a model."""
        with self._lock:
            return self._tallies.setdefault(name, BatchTally())

    def _load_rows(
        self,
        folder: Path,
        description: ModelDescription,
        tables: Mapping[str, tuple[ServedTable, int]],
        lookups: Mapping[str, LeveledLookup],
        options: ModelOptions,
    ) -> None:
        """Have the rows of a version in the levels, once all of its tables are checked."""
        due: dict[RowsOf, tuple[RowSource, int | None]] = {}
        for table, (served, _) in tables.items():
            content = _content(description, table, options)
            rows = RowsOf(description.name, served.name)
            if self.rows.is_due(rows, description.version, content, lookups[served.name]):
                due[rows] = _source(folder, table, served.dim, options), content
            else:
                self.rows.take(rows, lookups[served.name])
        for rows in due:
            self.rows.note_begun(rows)
        for rows, (source, _) in due.items():
            self.rows.load(rows, source, lookups[rows.store_name])
        for rows, (_, content) in due.items():
            if lookups[rows.store_name].levels is not None:
                self.rows.note_loaded(rows, description.version, content)

    def _forget(self, token: object, tables: Mapping[str, int]) -> None:
        """Count the bytes of a version no more, but for those of ``tables``, whose rows stay."""
        with self._lock:
            del self._held[token]
            self._left |= {name: n for name, n in tables.items() if self.rows.has_rows_of(name)}

    def _drop(self, token: object, rows: RowsOf, lookup: LeveledLookup) -> None:
        """Delete the rows of a version that is let go of while the server goes on, unless another
        model answers by them, too."""
        if self.is_closing:
            return
        try:
            self.rows.forget(rows)
            if not self.lookups.is_shared(token, rows.store_name):
                self.rows.delete(rows, lookup)
        except (OSError, RowStoreError) as error:
            # The version is let go of all the same, and rows that nobody reads do no harm.
            _logger.warning("rows of table %s stay in the stores: %s", rows.store_name, error)


def _content(description: ModelDescription, table: str, options: ModelOptions) -> int | None:
    """A number of the rows of a table in the folder of a version, by the checksums of their files;
    None of those of HugeCTR, which have none."""
    index = description.files.get(f"{TABLES_FOLDER}/{table}/{INDEX}")
    if index is None or table in options.hugectr_folders:
        return None
    return (index.num_bytes << 32 | index.crc32) & (2**63 - 1)


def _source(folder: Path, table: str, dim: int, options: ModelOptions) -> RowSource:
    """The rows of a table of a version, checked."""
    folders = options.hugectr_folders.get(table)
    if folders is None:
        return open_table(folder, table)
    return open_hugectr_table(folders, table, dim)


def served_tables(
    description: ModelDescription, options: ModelOptions
) -> dict[str, tuple[ServedTable, int]]:
    """Each table of a version by its name, as it is served, with its number of rows.

    Raises:
        ValueError: where the options have defaults or rows for tables that there are none of, and
            where these rows are not there.
    """
    names = [table.name for table in description.tables]
    for what, given in (
        ("folders of HugeCTR (embedding_table_names)", options.hugectr_folders),
        ("defaults", options.defaults),
    ):
        unknown = sorted(set(given) - set(names))
        if unknown:
            raise ValueError(f"{what} must be of tables of the model, {names}, got {unknown}")
    return {
        table.name: (
            ServedTable(
                name=store_name(description.name, description.version, table, options),
                dim=table.dim,
                row_format=options.row_format,
                default=options.defaults.get(table.name, table.default),
            ),
            _num_rows(table, options),
        )
        for table in description.tables
    }


def _num_rows(table: DeployedTable, options: ModelOptions) -> int:
    folders = options.hugectr_folders.get(table.name)
    return table.num_rows if folders is None else num_hugectr_rows(folders, table.name)


def store_name(model: str, number: int, table: DeployedTable, options: ModelOptions) -> str:
    """The name of a table in stores."""
    name = f"{model}/{table.name}" if table.store_name is None else table.store_name
    return f"{name}@{number}" if options.rows_by_version else name
