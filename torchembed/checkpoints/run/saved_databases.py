"""Rows of tables that a checkpoint holds in databases."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    TensorProperties,
    TensorStorageMetadata,
)

from torchembed.checkpoints.run.database_form import DatabasePart, SavedDatabase
from torchembed.stores import RowStore, RowTable
from torchembed.tables import LINES, LineLayout

ReadRows = Callable[[str, range], Tensor]
"""Gives some consecutive rows of a tensor of the checkpoint by its entry; on the CPU."""


class SavedDatabases:
    """The tables that a checkpoint holds in databases, of all ranks together.

    Attributes:
        databases: of all ranks.
        entries: what a checkpoint says of tensors, of each weight and state, by name.
    """

    def __init__(
        self, databases: Sequence[SavedDatabase], open_folder: Callable[[str], RowStore]
    ) -> None:
        """
        Args:
            open_folder: opens a database by the name of its folder.
        """
        self.databases = list(databases)
        self.entries: dict[str, STORAGE_TYPES] = {}
        self._pieces: dict[str, list[tuple[_OpenDatabase, DatabasePart, int]]] = {}
        self._opened = [_OpenDatabase(saved, open_folder) for saved in databases]
        for opened in self._opened:
            form = opened.saved.form
            for part in form.parts:
                self._add(part.weight, opened, part, 0, form.dtype, part.size)
                for number, (state, columns) in enumerate(form.state_columns.items(), 1):
                    size = part.size[:1] if columns is None else part.size
                    if state in part.states:
                        self._add(part.states[state], opened, part, number, "float32", size)

    def _add(
        self,
        name: str,
        opened: "_OpenDatabase",
        part: DatabasePart,
        number: int,
        dtype: str,
        size: Sequence[int],
    ) -> None:
        self._pieces.setdefault(name, []).append((opened, part, number))
        properties = TensorProperties(dtype=getattr(torch, dtype))
        self.entries[name] = TensorStorageMetadata(properties, torch.Size(size), [])

    def __contains__(self, name: str) -> bool:
        return name in self._pieces

    def check(self, parts: Iterable[DatabasePart], weights: Iterable[str]) -> None:
        """Open the databases that hold something of the same rows as ``parts`` of tables, or
        anything of whole ``weights``.

        Raises:
            CorruptStoreError: for one that is not as it was written.
        """
        wanted, whole = list(parts), set(weights)
        for opened in self._opened:
            if any(
                part.weight in whole or any(_share_rows(part, own) for own in wanted)
                for part in opened.saved.form.parts
            ):
                opened.table()

    def rows(self, name: str, rows: range, columns: range | None, of_tensors: ReadRows) -> Tensor:
        """Some consecutive rows of a weight or state, and of these some columns, or all; on the
        CPU.

        Args:
            of_tensors: reads tensors that the checkpoint holds beside databases.
        """
        entry = self.entries[name]
        assert isinstance(entry, TensorStorageMetadata)
        wanted = range(entry.size[1]) if columns is None and len(entry.size) > 1 else columns
        shape = (len(rows),) if wanted is None else (len(rows), len(wanted))
        found = torch.empty(shape, dtype=entry.properties.dtype)
        for opened, part, number in self._pieces[name]:
            here = _overlap(rows, part.offsets[0], part.shape[0])
            if not here:
                continue
            values = opened.read(part, here, of_tensors)[number]
            places = slice(here.start - rows.start, here.stop - rows.start)
            if wanted is None:
                found[places] = values
                continue
            of_part = _overlap(wanted, part.offsets[1], part.shape[1])
            if of_part:
                first = part.offsets[1]
                found[places, of_part.start - wanted.start : of_part.stop - wanted.start] = values[
                    :, of_part.start - first : of_part.stop - first
                ]
        return found

    def have_lines(self, name: str, rows: range, of_tensors: ReadRows) -> Tensor:
        """bool ``[n]``: which of some consecutive rows of a weight were written, in any columns."""
        found = torch.zeros(len(rows), dtype=torch.bool)
        for opened, part, _ in self._pieces[name]:
            here = _overlap(rows, part.offsets[0], part.shape[0])
            if here:
                opened.read(part, here, of_tensors)
                places = slice(here.start - rows.start, here.stop - rows.start)
                found[places] |= opened.have_lines
        return found

    def parts(self, name: str) -> list[DatabasePart]:
        """The parts of which a weight consists."""
        return [part for _, part, _ in self._pieces[name]]

    def forget(self) -> None:
        """Give the memory of the rows back that were read last."""
        for opened in self._opened:
            opened.forget()

    def close(self) -> None:
        """Close all databases."""
        for opened in self._opened:
            opened.close()


class _OpenDatabase:
    """Reads lines of a database, which is opened when the first is read; those that were read last
    are kept, since weights and states are read one after the other."""

    def __init__(self, saved: SavedDatabase, open_folder: Callable[[str], RowStore]) -> None:
        self.saved = saved
        self._open_folder = open_folder
        self._layout = LineLayout(saved.form.tensors(0))
        self._store: RowStore | None = None
        self.forget()

    def forget(self) -> None:
        self._last: tuple[DatabasePart, range] | None = None
        self._tensors: list[Tensor] = []
        self.have_lines = torch.zeros(0, dtype=torch.bool)
        """bool ``[n]``: which of the rows that were read last have a line."""

    def table(self) -> RowTable | None:
        """The lines; None where there are none."""
        if self.saved.folder is None:
            return None
        if self._store is None:
            self._store = self._open_folder(self.saved.folder)
        return self._store.table(LINES, self._layout.line_bytes)

    def read(self, part: DatabasePart, rows: range, of_tensors: ReadRows) -> list[Tensor]:
        """The weight and the states of some consecutive rows of a whole table, all in ``part``."""
        if self._last == (part, rows):
            return self._tensors
        num_rows, table = len(rows), self.table()
        lines = torch.empty(num_rows, self._layout.line_bytes, dtype=torch.uint8)
        have_lines = torch.zeros(num_rows, dtype=torch.bool)
        if table is not None:
            first = part.first_line + rows.start - part.offsets[0]
            have_lines = table.read(torch.arange(first, first + num_rows), lines)
        tensors = self.saved.form.tensors(num_rows)
        self._layout.unpack(lines[have_lines], tensors, have_lines.nonzero().flatten())
        others = (~have_lines).nonzero().flatten()
        weight, *states = tensors
        for state in states:
            state[others] = self.saved.form.initial_state
        if part.initial is None:
            weight[others] = 0
        elif len(others):
            ids = torch.arange(rows.start, rows.stop)
            if part.is_dynamic:
                ids = of_tensors(f"{part.weight.removesuffix('weight')}index.ids", rows)
            made = torch.empty(len(others), weight.shape[1], dtype=weight.dtype)
            part.initial.fill(made, ids[others], part.offsets[1])
            weight[others] = made
        self._last, self._tensors, self.have_lines = (part, rows), tensors, have_lines
        return tensors

    def close(self) -> None:
        self.forget()
        if self._store is not None:
            self._store.close()
            self._store = None


def _share_rows(one: DatabasePart, other: DatabasePart) -> bool:
    rows = range(one.offsets[0], one.offsets[0] + one.shape[0])
    return one.weight == other.weight and bool(_overlap(rows, other.offsets[0], other.shape[0]))


def _overlap(wanted: range, first: int, length: int) -> range:
    return range(max(wanted.start, first), min(wanted.stop, first + length))
