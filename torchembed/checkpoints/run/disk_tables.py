"""Tables that a checkpoint or the run has on disk, and that are loaded by the numbers of rows, or
with the database that they are in."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from torchembed.checkpoints.files import save_planner
from torchembed.checkpoints.run.database_form import (
    DatabaseForm,
    DatabasePart,
    SavedDatabase,
    disk_groups,
    num_hashed_rows,
)
from torchembed.checkpoints.run.run_tables import RunTable
from torchembed.checkpoints.run.saved_state import SavedState
from torchembed.tables import (
    DiskGroup,
    Table,
    row_ranges,
    table_states,
    write_numbered_rows,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiskTable(RunTable):
    """A table of which a checkpoint holds the same rows as the run, on disk in one of both."""

    def holds(self, key: str) -> bool:
        """True for an entry of the checkpoint or the run that is loaded with the table's rows."""
        return key in self.states.values() or key in [f"model.{name}" for name in self.names]

    def part(self) -> DatabasePart:
        """The part of the whole table that is here."""
        return DatabasePart.of(self.table, self.names[0], dict(self.states))

    def mismatches(self, saved: SavedState) -> Iterator[str]:
        """Reasons why the table cannot be loaded."""
        size, own, dtype = saved.tensors.size(self.weight), self.part(), self.table.parameter.dtype
        found = saved.tensors.dtype(self.weight)
        if tuple(size) != own.size:
            yield f"{self.weight} has shape {list(size)}, and {list(own.size)} in the run"
        if found != dtype:
            yield f"{self.weight} has dtype {found}, and {dtype} in the run"
        states = table_states(self.table)
        for name, key in self.states.items():
            wanted = own.size if states[name].dim() > 1 else own.size[:1]
            if key not in saved.entries:
                yield f"{key} was not saved"
            elif tuple(saved.tensors.size(key)) != wanted:
                found_size = list(saved.tensors.size(key))
                yield f"{key} has shape {found_size}, and {list(wanted)} in the run"

    def load(self, saved: SavedState) -> None:
        """Write the saved rows and states to the rows of the same numbers."""
        own, tensors, table = self.part(), saved.tensors, self.table
        is_on_disk = isinstance(table.group, DiskGroup)
        # A row that was never written has its initial values, which need no line.
        skips_initial = (
            is_on_disk
            and self.weight in tensors.databases
            and all(part.initial == own.initial for part in tensors.databases.parts(self.weight))
        )
        columns = range(own.offsets[1], own.offsets[1] + own.shape[1])
        row_bytes = table.spec.dim * tensors.dtype(self.weight).itemsize
        digests = table.index_contents().get("digests")
        for part in row_ranges(own.shape[0], row_bytes, save_planner.CHUNK_BYTES):
            rows = range(own.offsets[0] + part.start, own.offsets[0] + part.stop)
            is_wanted = torch.ones(len(rows), dtype=torch.bool)
            if digests is not None:
                is_wanted &= _is_used(table, digests, part)
            if skips_initial:
                is_wanted &= tensors.databases.have_lines(self.weight, rows, tensors.rows)
            places = is_wanted.nonzero().flatten()
            if not len(places):
                continue

            found = {}
            for key in (self.weight, *self.states.values()):
                is_divided = len(tensors.size(key)) > 1
                found[key] = tensors.rows(key, rows, columns if is_divided else None)[places]
            states = {name: found[key] for name, key in self.states.items()}
            write_numbered_rows(table, places + part.start, found[self.weight], states)
        tensors.forget()


def disk_tables(tables: Iterable[RunTable]) -> list[DiskTable]:
    """The tables that are on disk in a run or a checkpoint, and lie in the same rows in both."""
    return [DiskTable(**vars(found)) for found in tables if found.is_alike and found.is_on_disk]


def load_disk_tables(model: nn.Module, tables: Sequence[DiskTable], saved: SavedState) -> None:
    """Give tables the rows and states that were saved: where a saved database has the form of one
    of the run's, its files; else row by row. The run's other databases are emptied."""
    of_tables = {id(of_table.table): of_table for of_table in tables}
    row_by_row = list(tables)
    for group in disk_groups(model):
        members = [of_tables[id(table)] for table in group.tables if id(table) in of_tables]
        _take_seeds(members, saved)
        found = None
        if len(members) == len(group.tables):
            found = _database_like(group, members, saved)
        folder = None if found is None else found.folder
        group.replace_lines(None if folder is None else saved.local_folder(folder))
        if found is not None:
            row_by_row = [of_table for of_table in row_by_row if of_table not in members]
    for of_table in row_by_row:
        of_table.load(saved)


def _take_seeds(members: Sequence[DiskTable], saved: SavedState) -> None:
    """Let static tables of modules that hold no other go on with the saved seed, where they drew
    one themselves: rows without a line follow from it."""
    for of_table in members:
        if not of_table.table.may_join or of_table.weight not in saved.tensors.databases:
            continue
        initial = saved.tensors.databases.parts(of_table.weight)[0].initial
        if initial is not None and num_hashed_rows(of_table.table) is None:
            of_table.table.reseed(initial.seed)


def _database_like(
    group: DiskGroup, members: Sequence[DiskTable], saved: SavedState
) -> SavedDatabase | None:
    """The saved database with a line for each row of ``group``, under its number."""
    own = DatabaseForm.of(group, [member.part() for member in members])
    for database in saved.tensors.databases.databases:
        if database.form == own:
            return database
    return None


def _is_used(table: Table, digests: Tensor, part: range) -> Tensor:
    """bool ``[n]``: which rows of a dynamic table have ids, or are shared by ids without one."""
    is_used = digests[part.start : part.stop].cpu() > 0
    rows = torch.arange(part.start, part.stop)
    return is_used | (rows >= table.num_rows - (num_hashed_rows(table) or 0))
