"""Bounds of dynamic tables: ids of the least scores go while a table holds more than its bound."""

from collections.abc import Sequence
from typing import Self

import torch

from torchembed.ops.hash_table import Counter, TableShape, count_erased, slot_ranges
from torchembed.tables.deferred_interrupts import interrupts_deferred
from torchembed.tables.dynamic.erasing_step import ErasingStep
from torchembed.tables.dynamic.policies import Dynamic, index_bytes_of
from torchembed.tables.row_index import IndexedTable

_UNBOUNDED = torch.iinfo(torch.int64).max


class RowBounds:
    """Keeps the tables of a group near a number of rows, by a few blocks of each in each step.

    While a table holds more ids than its bound, each step brings the blocks that it visits down to
    their share of the target, by their scores; otherwise it changes nothing. A pass over all blocks
    takes ``sweep_steps`` steps at most, and no more than there are blocks. So after any step the
    table holds at most its bound and the ids that were inserted in the last pass, and rows in use.

    Args:
        dynamic: the bounds of each whole table.
        tables: of the group, in order.
        shapes: of the tables.
        device: of the tables.
    """

    def __init__(
        self,
        dynamic: Dynamic,
        tables: Sequence[IndexedTable],
        shapes: Sequence[TableShape],
        device: torch.device,
    ) -> None:
        self._dynamic = dynamic
        self._num_shares = [table.num_shares for table in tables]
        self._limits = torch.empty(2, len(tables), dtype=torch.int64, device=device)
        """The rows above which ids go, and those down to which they do."""
        self._set_limits([dynamic.max_rows] * len(tables))
        lanes = []
        for slots, shape in zip(slot_ranges(shapes), shapes, strict=True):
            size, num_blocks = shape.num_buckets * shape.num_slots, shape.num_blocks
            visited = -(-num_blocks // dynamic.sweep_steps)
            num_steps = -(-num_blocks // visited)
            fixed = slots.table, slots.first_slot, size, num_blocks, visited, num_steps
            lanes.extend((*fixed, number) for number in range(visited))
        # A lane is a block that a step visits, in a row of its own, filled up to the largest one.
        columns = torch.tensor(lanes, dtype=torch.int64, device="cpu").T
        sizes = columns[2][:, None]
        offsets = torch.arange(int(sizes.max()), device="cpu")
        is_slot = offsets < sizes
        self._tables, self._firsts, self._sizes, self._num_blocks = columns[:4].to(device)
        self._visited, self._num_steps, self._numbers = columns[4:].to(device)
        self._ranks, self._is_slot = offsets.to(device), is_slot.to(device)
        self._offsets = offsets.minimum(sizes - 1).to(device)
        self._places = is_slot.flatten().nonzero().flatten().to(device)
        """The entries of lanes that are slots, each of which comes once."""

    @classmethod
    def under(
        cls,
        dynamic: Dynamic,
        tables: Sequence[IndexedTable],
        shapes: Sequence[TableShape],
        device: torch.device,
    ) -> Self | None:
        """The bounds of tables by their policies; None where nothing but their capacity bounds
        them."""
        if dynamic.max_rows is None and dynamic.max_bytes is None:
            return None
        return cls(dynamic, tables, shapes, device)

    def set_row_bytes(self, row_bytes: Sequence[int]) -> None:
        """Turn a bound in bytes into rows, for rows of whole tables that take ``row_bytes`` each,
        with their optimizer state, beside what the index keeps of them."""
        max_rows, max_bytes = self._dynamic.max_rows, self._dynamic.max_bytes
        if max_bytes is None:
            return
        of_index = index_bytes_of(self._dynamic)
        by_bytes = [max_bytes // (of_row + of_index) for of_row in row_bytes]
        self._set_limits([n if max_rows is None else min(n, max_rows) for n in by_bytes])

    def _set_limits(self, max_rows: Sequence[int | None]) -> None:
        limits = []
        for of_table, num_shares in zip(max_rows, self._num_shares, strict=True):
            if of_table is None:
                limits.append((_UNBOUNDED, 0))
            else:
                of_part = of_table // num_shares
                limits.append((of_part, int(of_part * self._dynamic.evict_to)))
        self._limits.copy_(torch.tensor(limits, dtype=torch.int64, device="cpu").T)

    @interrupts_deferred()  # An id goes from all tensors, or stays.
    def evict(self, step: ErasingStep) -> None:
        """Evict ids in the blocks that the step's epoch visits.

        Torch operations of static shapes: never waits for a GPU, and may be captured.
        """
        hash_tables, epoch = step.hash_tables, step.epoch
        max_rows, targets = self._limits
        is_over = hash_tables.counters[:, Counter.SIZE] > max_rows
        if step.is_trained is not None:
            is_over &= step.is_trained
        numbers = epoch % self._num_steps * self._visited + self._numbers
        is_due = is_over[self._tables] & (numbers < self._num_blocks)
        numbers = numbers % self._num_blocks
        slots = (self._firsts + numbers * self._sizes)[:, None] + self._offsets
        is_held = (hash_tables.digests[slots] > 0) & self._is_slot
        touched = hash_tables.touched[slots]
        may_go = is_held & (touched <= step.released)
        order = torch.sort(touched.masked_fill(~may_go, _UNBOUNDED), stable=True).indices
        if hash_tables.scores is not None:
            scores = hash_tables.scores[slots].masked_fill(~may_go, _UNBOUNDED).gather(1, order)
            order = order.gather(1, torch.sort(scores, stable=True).indices)
        target = targets[self._tables]
        num_kept = target * (numbers + 1) // self._num_blocks - target * numbers // self._num_blocks
        num_going = (is_held.sum(1) - num_kept).clamp_min(0).minimum(may_go.sum(1)) * is_due
        is_first = self._ranks < num_going[:, None]
        is_going = torch.empty_like(may_go).scatter_(1, order, is_first)
        ages = ((epoch - touched) * is_going).sum(1)
        reason = Counter.EVICTED_TARGET
        count_erased(hash_tables.counters, self._tables, num_going, ages, reason)
        of_lanes = self._tables[:, None].expand_as(slots)
        at, is_gone, tables = (t.flatten()[self._places] for t in (slots, is_going, of_lanes))
        step.erase(at, is_gone, tables, reason)
