"""Deltas: what changed in dynamic tables since a mark."""

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from torchembed.ops.hash_table import SlotRange, export_keys, find_slots
from torchembed.tables.dynamic.deletion_log import LoggedDeletions, SnapshotDueError
from torchembed.tables.dynamic.hash_index import HashIndex
from torchembed.tables.table import Table


class Operation(enum.Enum):
    """The operation of a delta on an id."""

    UPSERT = "upsert"
    """Give it the row, whether it has one or not."""
    DELETE = "delete"
    """Take it and its row away, if it is there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableMark:
    """A moment in the history of one table."""

    history: str
    """The name of the table's log."""
    epoch: int
    """Rows that were used last before this epoch have not changed since."""
    num_deletions: int
    """Ids that had left the tables of the group by then."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaMark:
    """A moment between two steps, for the next ``delta(since=mark)`` in the same process."""

    tables: Mapping[str, TableMark]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableDelta:
    """The changes of one dynamic table since a mark.

    An id occurs at most once, either in ``ids`` or in ``deleted_ids``. All tensors are on the CPU,
    and no later step changes them.
    """

    ids: Tensor
    """The ids that were inserted, used or trained, int64 ``[n]``, in the order of their rows."""
    rows: Tensor
    """Their rows, ``[n, D]``, of the table's dtype."""
    deleted_ids: Tensor
    """The ids that left the table and did not come back, int64 ``[m]``. Some may have come only
    after the mark, so that a copy of the table never had them."""
    deleted_epochs: Tensor
    """int64 ``[m]``: the batch, as the table counts them, whose admission saw each of them go."""
    deletion_reasons: Tensor
    """int64 ``[m]``: the :class:`~torchembed.ops.hash_table.Counter` that counted it."""
    shared_rows: Tensor
    """``[k, D]``: all rows that ids without one of their own share, as they are now, whether they
    changed or not; ``k`` is 0 without :class:`~torchembed.tables.HashedRows`."""

    def operations(self) -> Iterator[tuple[Operation, int, Tensor | None]]:
        """The changes one by one: operation, id and, of upserts, the row ``[D]``."""
        for id_ in self.deleted_ids.tolist():
            yield Operation.DELETE, id_, None
        for id_, row in zip(self.ids.tolist(), self.rows, strict=True):
            yield Operation.UPSERT, id_, row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
    """The changes of all dynamic tables of a module, up to one moment between two steps."""

    tables: Mapping[str, TableDelta]
    """Changes by the tables' names."""
    mark: DeltaMark
    """The moment."""


@torch.no_grad()
def read_delta(tables: Sequence[Table], since: DeltaMark | None) -> Delta:
    """Changes of the dynamic ones among ``tables``; waits for the device.

    Args:
        tables: of one module.
        since: of an earlier delta of it; None: all rows, and no deletions.

    Raises:
        ValueError: for a table without a log, or of which the rank holds some columns alone, or a
            mark of other tables.
        SnapshotDueError: if the logs do not reach back to the mark.
    """
    dynamic = _dynamic_tables(tables)
    if since is not None and since.tables.keys() != dynamic.keys():
        raise ValueError(
            f"since must be a mark of the tables {sorted(dynamic)}, which the module holds, got "
            f"one of {sorted(since.tables)}; take the mark of an earlier delta of this module"
        )
    mark = read_mark(tables)
    found = {
        name: _table_delta(table, mark.tables[name], None if since is None else since.tables[name])
        for name, table in dynamic.items()
    }
    return Delta(tables=found, mark=mark)


def read_mark(tables: Sequence[Table]) -> DeltaMark:
    """The mark of now, of the dynamic ones among ``tables``, of one module; waits for the device.

    Raises:
        ValueError: for a table without a log, or of which the rank holds some columns alone.
    """
    dynamic = _dynamic_tables(tables)
    for name, table in dynamic.items():
        if table.num_columns != table.spec.dim:
            raise ValueError(
                f"table {name} must have all of its {table.spec.dim} columns on one "
                f"rank for deltas, got {table.num_columns} here; shard it by rows or whole"
            )
    return DeltaMark(tables={name: _table_mark(table) for name, table in dynamic.items()})


def _dynamic_tables(tables: Sequence[Table]) -> dict[str, Table]:
    return {t.spec.name: t for t in tables if isinstance(t.group.index, HashIndex)}


def _table_mark(table: Table) -> TableMark:
    name, index = table.spec.name, table.group.index
    assert isinstance(index, HashIndex)
    log = index.deletions
    if log is None:
        raise ValueError(
            f"table {name} keeps no log of the ids that leave it, got deletion_log=0; give it "
            "dynamic=Dynamic(deletion_log=...) for deltas"
        )
    released, num_now = torch.cat([index.clock.released, log.num_appended]).tolist()
    # Rows of batches under way are in this delta as they are, and in the next one once more.
    return TableMark(history=log.history, epoch=released + 1, num_deletions=num_now)


def _table_delta(table: Table, now: TableMark, since: TableMark | None) -> TableDelta:
    """The changes from ``since``, None for the beginning, to the mark of now."""
    name, index = table.spec.name, table.group.index
    assert isinstance(index, HashIndex)
    log = index.deletions
    assert log is not None
    if since is None:
        since = dataclasses.replace(now, epoch=0)
    if since.history != log.history:
        raise SnapshotDueError(
            f"since must be a mark of table {name} as it is, and its ids were loaded or moved to "
            "another group or device since then, or it is of another process; a full snapshot is "
            "due, delta(since=None)"
        )
    number, state = table.group.tables.index(table), index.hash_tables
    slots = SlotRange(number, table.group.first_row_of(table), table.num_rows)
    changed = export_keys(state, slots, slots.of(state.touched) >= since.epoch)
    num_changed = int(changed.num_keys)
    shared = torch.arange(index.capacity(number), table.num_rows) + slots.first_slot
    gone = _gone(index, number, log.since(since.num_deletions, now.num_deletions))
    return TableDelta(
        ids=changed.keys[:num_changed].cpu(),
        rows=table.group.read_weight(changed.slots[:num_changed]),
        deleted_ids=gone.ids.cpu(),
        deleted_epochs=gone.epochs.cpu(),
        deletion_reasons=gone.reasons.cpu(),
        shared_rows=table.group.read_weight(shared),
    )


def _gone(index: HashIndex, table: int, logged: LoggedDeletions) -> LoggedDeletions:
    """The ids of ``table`` in ``logged`` that it does not hold now, each as it left last;
    ascending."""
    of_table = LoggedDeletions(*(column[logged.tables == table] for column in logged))
    ids, inverse = of_table.ids.unique(return_inverse=True)
    places = torch.arange(len(inverse), device=ids.device)
    last = torch.zeros_like(ids).scatter_reduce_(0, inverse, places, "amax")
    tables = torch.full_like(ids, table, dtype=torch.int32)
    last = last[find_slots(index.hash_tables, ids, tables) < 0]
    return LoggedDeletions(*(column[last] for column in of_table))
