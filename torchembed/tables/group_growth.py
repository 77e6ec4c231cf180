"""Growth of dynamic tables: a group's rows move to larger memory, and all that belongs to them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.core.own_storage import with_own_storage
from torchembed.tables.group import TableGroup
from torchembed.tables.hash_index import HashIndex

_PIECE = 2**18
"""Rows that are copied at a time."""


class GrownGroup:
    """A group with more rows, made beside what it is now until :meth:`take_place`.

    Ids keep their rows, optimizer state, scores and last uses, bit for bit. Rows without an id are
    zeros. Waits for the device.

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
        old_rows = (self._grown.new_slots >= 0).nonzero().flatten()
        new_rows = self._grown.new_slots[old_rows]

        def moved(tensor: Tensor, initial: float) -> Tensor:
            made = tensor.new_full((sum(num_rows), *tensor.shape[1:]), initial)
            for old, new in zip(old_rows.split(_PIECE), new_rows.split(_PIECE), strict=True):
                made.index_copy_(0, new, tensor[old])
            return made

        self._weight = moved(group.weight, 0.0)
        self._states = tuple(moved(state, group.initial_state) for state in group.states)

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
