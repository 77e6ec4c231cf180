"""Exports of a model one after the other, each of what has changed since the one before."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchembed.checkpoints.exports.model_changes import (
    ModelChanges,
    changes_since,
    dynamic_tables,
)
from torchembed.checkpoints.exports.model_shards import ModelShards
from torchembed.checkpoints.exports.whole_model import write_tensors
from torchembed.checkpoints.files.checked_json import to_checked_json
from torchembed.checkpoints.files.numbered_folders import numbered_folders
from torchembed.checkpoints.files.storage import FileDigest, Storage
from torchembed.checkpoints.files.tensor_file import bytes_of, header_of
from torchembed.checkpoints.rows.model_rows import model_rows
from torchembed.checkpoints.rows.row_folder import export_rows
from torchembed.core import ranks
from torchembed.core.ranks.collective_errors import decide_on_first_rank
from torchembed.tables import (
    DeltaMark,
    RowChunk,
    Table,
    TableDelta,
)

FORMAT = 2
DESCRIPTION, CHANGES, REST, ROWS = "delta.json", "changes.safetensors", "rest.safetensors", "rows"


class Description(NamedTuple):
    """The contents of an export."""

    number: int
    is_whole: bool
    """True where all rows of dynamic tables are in it, and not only those that have changed since
    the export before."""
    tables: list[str]
    """The weights of dynamic tables by their names in ``state_dict``."""
    files: dict[str, FileDigest]
    """Size and CRC-32 of each file beside rows, which have their own, by name."""


class DeltaFolder:
    """Numbered exports of a model: whole ones, and between them only the rows of dynamic tables
    that have changed since the export before, and the ids that have left.

    All else, dense parameters, buffers and static tables, is whole in each. A copy of the model
    elsewhere follows by :func:`~torchembed.checkpoints.load_deltas`. An export is a folder of
    safetensors files by its number, which appears once it is whole; in an object store it counts
    once its ``delta.json`` is there. Optimizer state is not in it.

    Args:
        path: a local folder, or the URL of one, which fsspec knows. All ranks see it; it is made
            where there is none.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self._folders = numbered_folders(path, DESCRIPTION)
        self._marks: dict[str, DeltaMark] = {}
        self._number: int | None = None
        """The number of the export that the marks are of."""

    def numbers(self) -> list[int]:
        """The numbers of the exports that are there, in order."""
        return self._folders.numbers()

    @torch.no_grad()
    def export(self, model: nn.Module, number: int) -> bool:
        """Write export ``number`` of ``model``; collective, between two steps. Waits for a GPU.

        It is a whole one where this object has not written the one before of the same model, as in
        a run that goes on from a checkpoint, where tables were loaded since, or where more ids have
        left them than their ``deletion_log`` holds. Exports of this number and later ones, of steps
        that are trained once more, are removed: at the end, in an object store at the beginning.

        Args:
            number: from 0 on; that before it must be there.

        Returns:
            True where it is a whole one.

        Raises:
            ValueError: for a number whose predecessor is not there, and for dynamic tables without
                a ``deletion_log``, or whose columns are divided over ranks.
            OSError: if writing fails.
        """
        what = f"export number {number} to {self.path}"
        decide_on_first_rank(lambda: self._begin(number), what)
        folder = self._folders.unfinished(number)
        storage = Storage(folder)
        found, tables = self._changes(model, number), dynamic_tables(model)
        names = sorted({n for of_rank in ranks.gather_objects(list(tables)) for n in of_rank})
        here = {n: t for n, t in tables.items() if t.is_sharded or ranks.rank() == 0}
        for name in names:
            whole = model_rows(model, name, with_states=False) if found.is_whole else iter(())
            chunks = _chunks(here[name], found, name, whole) if name in here else iter(())
            export_rows(chunks, f"{folder}/{ROWS}/{name}")
        changes = _of_all_ranks({n: (t.id_share.place, found.tables[n]) for n, t in here.items()})
        decide_on_first_rank(lambda: _write_file(storage, CHANGES, changes), what)
        shards = ModelShards(model)
        rest = {n: w for n, w in shards.tensors.items() if not is_of_tables(n, names)}
        open_file = functools.partial(storage.create_stream, storage.path(REST), "wb")
        write_tensors(shards, open_file, rest, what)

        def end() -> None:
            files = {name: storage.written[storage.path(name)] for name in (CHANGES, REST)}
            described = Description(number, found.is_whole, names, files)._asdict()
            content = to_checked_json({"format": FORMAT, **described})
            self._folders.complete(number, content)

        decide_on_first_rank(end, what)
        self._marks, self._number = found.marks, number
        return found.is_whole

    def _begin(self, number: int) -> None:
        if number < 0:
            raise ValueError(f"number must not be negative, got {number}")
        there = self.numbers()
        if number and number - 1 not in there:
            raise ValueError(
                f"number must follow one that is there, got {number}, and {self.path} holds "
                f"{there}; go on from the last"
            )
        self._folders.begin(number)

    def _changes(self, model: nn.Module, number: int) -> ModelChanges:
        """Find what has changed since the last export, or for a whole one the rows that ids share;
        collective."""
        # An export of a model without dynamic tables needs none before it.
        is_dynamic = ranks.any_rank(bool(dynamic_tables(model)))
        is_whole = not number or self._number != number - 1 or not is_dynamic
        found = changes_since(model, self._marks, is_whole=is_whole)
        if not found.is_whole:
            return found
        # Nothing has changed since this moment, but shared rows are in each delta.
        return changes_since(model, found.marks)._replace(is_whole=True)


def is_of_tables(name: str, weights: Sequence[str]) -> bool:
    """True for an entry of a state dict that belongs to a dynamic table among ``weights``."""
    return any(name == w or name.startswith(f"{w.removesuffix('weight')}index.") for w in weights)


def _chunks(
    table: Table, changes: ModelChanges, name: str, whole: Iterator[RowChunk]
) -> Iterator[RowChunk]:
    """The chunks of a table's rows that this rank writes; at least one."""
    if not changes.is_whole:
        yield RowChunk(changes.tables[name].ids, changes.tables[name].rows, states={})
        return
    none = torch.empty(0, dtype=torch.int64)
    rows = torch.empty(0, table.spec.dim, dtype=table.spec.dtype)
    yield RowChunk(none, rows, {}, scores=none, touched=none)
    yield from whole


def _of_all_ranks(here: Mapping[str, tuple[int, TableDelta]]) -> dict[str, Tensor]:
    """For each table the ids that have left it, and the rows that ids share in each of its parts,
    from the place of this rank's part and its changes; collective, and of rank 0 alone."""
    parts = [(name, *of_table) for name, of_table in here.items()]
    of_all = ranks.gather_objects(
        [(n, place, c.deleted_ids, c.shared_rows) for n, place, c in parts]
    )
    found = sorted((part for of_rank in of_all for part in of_rank), key=lambda part: part[:2])
    tensors: dict[str, list[Tensor]] = {}
    for name, _, deleted, shared in found:
        tensors.setdefault(f"{name}.deleted", []).append(deleted)
        tensors.setdefault(f"{name}.shared", []).append(shared)
    return {name: torch.cat(of_parts) for name, of_parts in tensors.items()}


def _write_file(storage: Storage, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of the safetensors format."""
    with storage.create_stream(storage.path(name), "wb") as file:
        file.write(header_of({n: (tuple(t.shape), t.dtype) for n, t in tensors.items()}))
        for tensor in tensors.values():
            file.write(bytes_of(tensor))
