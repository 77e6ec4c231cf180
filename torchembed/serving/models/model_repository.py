"""The models of a server: loaded, updated, switched and let go of while they answer."""

import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from torchembed.serving.interface import (
    IndexEntry,
    ModelNotReadyError,
    ModelState,
    OutdatedUpdateError,
    ServedModel,
    UnknownModelError,
)
from torchembed.serving.levels import LeveledLookup
from torchembed.serving.models.dynamic_batcher import BatchTotals, DynamicBatcher
from torchembed.serving.models.model_folder import models_in, versions_in
from torchembed.serving.models.model_options import ModelOptions
from torchembed.serving.models.model_versions import ModelVersions
from torchembed.serving.models.row_loading import RowLoader, RowsOf
from torchembed.serving.models.version_lease import AnsweringModel
from torchembed.serving.models.version_loader import VersionLoader, store_name
from torchembed.stores import RowStore


class ModelRepository:
    """The models of a folder that :func:`~torchembed.serving.models.deploy` writes into
    (:class:`~torchembed.serving.interface.ModelDirectory`).

    A version is loaded beside those that answer, answers made-up requests, and only then takes the
    place of the current one, between requests: each is answered by one version from its beginning
    to its end. The version before stays loaded for :meth:`roll_back`. Rows are loaded into the
    stores of the lookups that ``make_lookup`` makes; models whose tables have one name in the
    stores share them and their cache.

    Rows that all versions share are those of the newest version that was loaded or whose updates
    came: a folder of an earlier version than its updates is loaded without its rows.

    Any number of threads may use it at once.

    Args:
        folder: of all models.
        options: of models that ``models`` does not name.
        models: those that :meth:`start` loads, with their options; None for all of the folder.
        records: the store that keeps rows when the process ends: versions whose rows it has are not
            loaded into it again.
        is_loading: False where the stores have all rows already.
        max_bytes: of memory that rows and dense parts of loaded versions may take; None for no
            limit, and where rows are not in memory.
    """

    def __init__(
        self,
        folder: str | Path,
        options: ModelOptions,
        *,
        models: Mapping[str, ModelOptions] | None = None,
        records: RowStore | None = None,
        is_loading: bool = True,
        max_bytes: int | None = None,
    ) -> None:
        self.folder, self._options, self._chosen = Path(folder), options, models
        rows = RowLoader(records, is_loading=is_loading)
        self._loader = VersionLoader(self.folder, rows, max_bytes)
        self._models: dict[str, ModelVersions] = {}
        self._lock = threading.Lock()
        self._is_ready = False

    def start(self) -> None:
        """Load all models, and be ready.

        Raises:
            UnknownModelError, ValueError: as :meth:`load`, for the first that cannot be loaded.
        """
        for name in self._chosen if self._chosen is not None else models_in(self.folder):
            self.load(name)
        self._is_ready = True

    @property
    def is_ready(self) -> bool:
        """True once :meth:`start` has loaded all models that it is to load."""
        return self._is_ready

    def model(self, name: str, version: str | None = None) -> ServedModel:
        """The version of a model that answers, by default the current one.

        Raises:
            UnknownModelError, ModelNotReadyError: if there is none that answers.
        """
        versions = self._known(name)
        number = None if version is None else _number(name, version)
        answering = AnsweringModel(lambda: versions.find(number))
        versions.find(number)
        return answering

    def versions(self, name: str) -> list[str]:
        """The numbers of the versions that answer, oldest first.

        Raises:
            UnknownModelError: if there is no such model.
        """
        return [str(lease.number) for lease in self._known(name).leases()]

    def index(self) -> list[IndexEntry]:
        """All models in the folder, loaded or not, with their states and why one is unavailable."""
        entries = []
        for name in sorted({*models_in(self.folder), *self._models}):
            versions = self._models.get(name)
            loaded = versions.leases() if versions is not None else []
            entries += [IndexEntry(name, str(v.number), ModelState.READY, "") for v in loaded]
            if versions is None:
                entries.append(IndexEntry(name, "", ModelState.UNAVAILABLE, "unloaded"))
            elif not loaded or versions.state is not ModelState.READY:
                entries.append(IndexEntry(name, "", versions.state, versions.reason))
        return entries

    def load(self, name: str, version: str | None = None) -> None:
        """Load a version of a model beside the current one, by default the newest, and answer by it
        from then on; returns when it answers.

        Raises:
            UnknownModelError: if the folder has no such model or version, or it is not to be
                served.
            ValueError: if it cannot be loaded; the current version goes on answering.
        """
        options = self._options_of(name)
        found = versions_in(self.folder, name)
        if options is None or not found:
            raise UnknownModelError(
                f"model must be one that {self.folder} has a version of and that is to be served, "
                f"got {name!r}"
            )
        wanted = sorted(options.versions) or found[-options.num_latest_versions :]
        if version is not None:
            of_folder = [n for n in found if n in options.versions or not options.versions]
            if _number(name, version) not in of_folder:
                raise UnknownModelError(
                    f"version of model {name} must be one that {self.folder} has and that is to be "
                    f"served, {of_folder}, got {version}"
                )
            wanted = [int(version)]
        with self._lock:
            versions = self._models.setdefault(name, ModelVersions(name))
        with versions.changing:
            loaded = {lease.number: lease for lease in versions.leases()}
            versions.state, versions.reason = ModelState.LOADING, ""
            try:
                for number in wanted:
                    lease = loaded.get(number) or self._loader.load(name, number, options)
                    versions.add(
                        lease,
                        options.num_latest_versions,
                        options.versions,
                        is_current=not loaded or number == wanted[-1],
                    )
            except Exception as error:
                versions.state, versions.reason = ModelState.UNAVAILABLE, str(error)
                raise ValueError(f"model {name} cannot be loaded: {error}") from error
            versions.state = ModelState.READY

    def unload(self, name: str) -> None:
        """Unload all versions of a model, once they have answered the requests under way.

        Raises:
            UnknownModelError: if there is no such model.
        """
        versions = self._known(name)
        with versions.changing:
            versions.state, versions.reason = ModelState.UNLOADING, ""
            versions.clear()
            versions.state, versions.reason = ModelState.UNAVAILABLE, "unloaded"

    def roll_back(self, name: str) -> str:
        """Answer for a model as before its last load or swap of the dense part; returns the
        version that answers then. Rows that versions share stay as they are.

        Raises:
            UnknownModelError: where there is no such model.
            ValueError: where there is nothing to roll back to.
        """
        versions = self._known(name)
        with versions.changing:
            return versions.roll_back()

    def apply_rows(
        self,
        model: str,
        table: str,
        keys: Tensor,
        rows: Tensor,
        *,
        version: int,
        deleted_keys: Tensor | None = None,
    ) -> None:
        """Write rows of a table of a model, and delete others; lookups that begin after the return
        see them. While the model is being loaded it waits.

        Args:
            table: its name in the model.
            keys: int64 ``[n]``; of one that comes several times the last row counts.
            rows: floating ``[n, D]``.
            version: of the model that the rows belong to.
            deleted_keys: int64 ``[m]``; those without a row are left alone.

        Raises:
            UnknownModelError: where no loaded version has the table, or rows of that version.
            OutdatedUpdateError: where a later version was deployed and loaded.
            TypeError, ValueError: for another dtype or shape.
            RowStoreError, OSError: where they cannot be stored now; calling again does no harm.
        """
        versions, options = self._known(model), self._options_of(model)
        assert options is not None
        with versions.changing:
            names: dict[str, None] = {}
            for lease in versions.leases():
                described = {t.name: t for t in lease.version.description.tables}
                if table in described and (not options.rows_by_version or lease.number == version):
                    names[store_name(model, lease.number, described[table], options)] = None
            if not names:
                raise UnknownModelError(
                    f"model {model} must be loaded with a table {table} that takes rows of version "
                    f"{version}, and is not"
                )
            if not options.rows_by_version:
                _check_version(model, version, max(lease.number for lease in versions.leases()))
            lookups = self.lookups()
            for name in names:
                lookups[name].apply_rows(name, keys, rows, deleted_keys)
                self._loader.rows.note(RowsOf(model, name), version)

    def swap_dense(self, model: str, tensors: Mapping[str, Tensor], version: int) -> None:
        """Answer for a model by another dense part from the next request on.

        Args:
            tensors: all weights, by their names in the deployed folder.
            version: that answers then have.

        Raises:
            UnknownModelError: where the model is not loaded; or has rows by version, and not of
                this one.
            OutdatedUpdateError: where the version that answers was deployed later.
            ValueError: for tensors of other names, shapes or dtypes.
        """
        versions, options = self._known(model), self._options_of(model)
        assert options is not None
        with versions.changing:
            try:
                lease = versions.find(version if options.rows_by_version else None)
            except ModelNotReadyError as error:
                raise UnknownModelError(str(error)) from None
            _check_version(model, version, lease.number)
            versions.swap(lease, lease.version.with_weights(tensors, version))

    def is_served(self, name: str, version: int | None = None) -> bool:
        """True for a model of which a version is loaded, so that updates can be applied.

        Args:
            version: of updates. Where each version has rows of its own, False for one that is later
                than all that are loaded: it is still to come.
        """
        versions, options = self._models.get(name), self._options_of(name)
        leases = [] if versions is None else versions.leases()
        if not leases:
            return False
        is_shared = options is None or not options.rows_by_version
        return version is None or is_shared or version <= leases[-1].number

    def lookups(self) -> dict[str, LeveledLookup]:
        """The lookup of each loaded table, by the table's name in stores."""
        return self._loader.lookups.lookups()

    def lookups_of(self, name: str) -> dict[str, LeveledLookup]:
        """Likewise, of the tables that a model answers by, those that it shares with others
        included; none where it is not loaded."""
        versions, options = self._models.get(name), self._options_of(name)
        if versions is None or options is None:
            return {}
        names = {
            store_name(name, lease.number, table, options)
            for lease in versions.leases()
            for table in lease.version.description.tables
        }
        return {table: lookup for table, lookup in self.lookups().items() if table in names}

    def batches(self) -> list[BatchTotals]:
        """The totals of all batches of models that are loaded or were, by model and version."""
        found: list[BatchTotals] = []
        for name, versions in list(self._models.items()):
            waiting = Counter[str]()
            for lease in versions.leases():
                if isinstance(lease.answering, DynamicBatcher):
                    waiting[lease.version.weights.version] += lease.answering.num_waiting
            counts = self._loader.tally(name).read()
            found += [BatchTotals(name, v, n, waiting[v], s) for v, (n, s) in counts.items()]
        return found

    def close(self) -> None:
        """Let go of all models, once they have answered what they were asked. Rows stay in the
        stores."""
        self._is_ready, self._loader.is_closing = False, True
        for versions in list(self._models.values()):
            with versions.changing:
                versions.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _known(self, name: str) -> ModelVersions:
        versions = self._models.get(name)
        if versions is None:
            raise UnknownModelError(
                f"model must be one of {sorted(self._models)}, which were loaded, got {name!r}"
            )
        return versions

    def _options_of(self, name: str) -> ModelOptions | None:
        return self._options if self._chosen is None else self._chosen.get(name)


def _check_version(model: str, version: int, deployed: int) -> None:
    """Raise ``OutdatedUpdateError`` for an update of a version before the deployed one; those of
    HugeCTR have none, which is 0."""
    if 0 < version < deployed:
        raise OutdatedUpdateError(
            f"updates of model {model} must be of version {deployed}, which was deployed, or "
            f"later, got version {version}; deploy(version=) and publish(version) must count alike"
        )


def _number(name: str, version: str) -> int:
    # Those of deploy() have 19 digits at most, and Python refuses numbers of thousands.
    if not (version.isascii() and version.isdigit()) or len(version) > 19:
        raise UnknownModelError(f"version of model {name} must be a number, got {version[:40]!r}")
    return int(version)
