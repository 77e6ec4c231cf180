"""Growth of dynamic tables: a group's rows move to larger memory, and all that belongs to them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.core.own_storage import with_own_storage
from torchembed.ops.hash_table import locate_keys, moved_rows
from torchembed.tables.deferred_interrupts import interrupts_deferred
from torchembed.tables.dynamic.growth_demand import capacity_for
from torchembed.tables.dynamic.hash_index import HashIndex
from torchembed.tables.group import TableGroup
from torchembed.tables.table import Table


class GrownGroup:
    """A group with more rows, made beside what it is now until :meth:`take_place`.

    Ids keep their rows, optimizer state, scores and last uses, bit for bit. Rows without an id are
    zeros. Beside them it takes 8 bytes for each old row, and a few MiB. Waits for the device.

    Args:
        group: of dynamic tables, in which no batch is under way and no gradient is pending.
        num_rows: of each table, what it has, doubled any number of times.

    Raises:
        torch.OutOfMemoryError: where there is no memory for them; nothing has changed.
    """

    @torch.no_grad()
    def __init__(self, group: TableGroup, num_rows: Sequence[int]) -> None:
        assert isinstance(group.index, HashIndex) and not group.pending and group.joined is None
        self._group, self._num_rows = group, list(num_rows)
        self._index, self._grown = group.index, group.index.grown(num_rows)
        new_slots, num = self._grown.new_slots, sum(num_rows)
        self._weight = moved_rows(group.weight, new_slots, num)
        self._states = tuple(
            moved_rows(state, new_slots, num, initial=group.initial_state) for state in group.states
        )

    @interrupts_deferred()
    @torch.no_grad()
    def take_place(self) -> None:
        """Let the group go on with the new rows. Parameters and what optimizers show of the state
        stay the same objects."""
        group = self._group
        for table, count in zip(group.tables, self._num_rows, strict=True):
            table.num_rows = count
        self._index.take_grown(self._grown)
        group.take_rows(self._weight, self._states)
        for table in group.tables:
            for shown, state in zip(table.shown_states, group.states, strict=True):
                shown.data = with_own_storage(group.table_rows(state, table))
        group.tables[0].owner.note_growth()


def can_grow_to(table: Table, num_rows: int) -> bool:
    """True if ``table`` is a dynamic one that has fewer rows now, and can grow to ``num_rows``."""
    group = getattr(table, "group", None)
    if group is None or not isinstance(group.index, HashIndex) or table.parameter.is_meta:
        return False
    number, index = group.tables.index(table), group.index
    capacity = num_rows - (table.num_rows - index.capacity(number))
    return table.num_rows < num_rows == index.rows_with(number, capacity)


def grow_to(table: Table, num_rows: int) -> None:
    """Let a dynamic ``table`` that has fewer rows have ``num_rows``, where it can grow to as many;
    before rows of one that has grown are loaded into it. Waits for the device.

    Raises:
        torch.OutOfMemoryError: where there is no memory for them; nothing has changed.
    """
    if can_grow_to(table, num_rows):
        of_group = [num_rows if of is table else of.num_rows for of in table.group.tables]
        GrownGroup(table.group, of_group).take_place()


def make_room(table: Table, ids: Tensor) -> None:
    """Let a dynamic ``table`` that may grow have room for ``ids [n]`` too, before they are written
    to it: in each of its blocks, since ids of another table come block by block. One that ranks
    divide gets all of its rows: its parts have equally many. Waits for the device.

    Raises:
        torch.OutOfMemoryError: where there is no memory for the rows; nothing has changed.
    """
    if table.is_sharded and table.num_rows < table.max_rows:
        grow_to(table, table.max_rows)
    while table.num_rows < table.max_rows and not _has_room(table, ids):
        index, number = table.group.index, table.group.tables.index(table)
        assert isinstance(index, HashIndex)
        grow_to(table, index.rows_with(number, index.capacity(number) + 1))


def _has_room(table: Table, ids: Tensor) -> bool:
    """True if no block is to have more than 3 of 4 rows taken with ``ids``."""
    index, number = table.group.index, table.group.tables.index(table)
    assert isinstance(index, HashIndex)
    state = index.hash_tables
    first, num_blocks, num_buckets, num_slots = state.geometry[number].tolist()
    size = num_buckets * num_slots
    is_held = state.digests[first : first + num_blocks * size].view(num_blocks, size) > 0
    tables = torch.full(ids.shape, number, dtype=torch.int32, device=ids.device)
    blocks = locate_keys(ids, tables, state.geometry).blocks
    taken = is_held.sum(1) + torch.bincount(blocks, minlength=num_blocks)
    return capacity_for(int(taken.max())) <= size
