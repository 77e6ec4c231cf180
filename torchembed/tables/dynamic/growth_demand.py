"""The rows that dynamic tables will need, estimated on the device from the ids of batches."""

from collections.abc import Sequence
from typing import Self, TypeVar

import torch
from torch import Tensor

from torchembed.ops.hash_table import Counter

_Numbers = TypeVar("_Numbers", int, Tensor)

_NUM_BATCHES = 3
"""Batches whose new ids are to find room: two come after the one that brought too many ids until
the table has grown, and one may bring too many unnoticed."""
_TAKEN, _OF = 3, 4
"""A table grows before more than 3 of 4 rows are taken: it evicts, though seldom before 9 of 10
are, when one of its buckets is full."""


def capacity_for(num_ids: _Numbers) -> _Numbers:
    """The rows of which ``num_ids`` take 3 of 4."""
    return (num_ids * _OF + _TAKEN - 1) // _TAKEN


class GrowthDemand:
    """Notes which tables of a group will be too small, and the rows that they will need then.

    A table is to grow once its ids, and three times as many as were new in the last batch, would
    take more than 3 of 4 rows. Works on the device, never waits for it, and may be captured.

    Args:
        capacities: of each table of the group the ids that it has rows for, now and once it has
            grown.
        device: of the tables.
    """

    def __init__(self, capacities: Sequence[tuple[int, int]], device: torch.device) -> None:
        numbers = torch.tensor(capacities, dtype=torch.int64, device=device)
        self._rows, max_rows = numbers.unbind(1)
        self._may_grow = self._rows < max_rows
        self._since = torch.zeros_like(self._rows)
        """The epoch that brought too many ids; 0 for none."""
        self._wanted = torch.zeros_like(self._rows)
        self._new_before = torch.zeros_like(self._rows)
        self.latest = self.at(torch.zeros_like(self._rows[:1]))
        """:meth:`at` after the last batch, always in the same memory."""

    @classmethod
    def of(cls, capacities: Sequence[tuple[int, int]], device: torch.device) -> Self | None:
        """The demand of tables; None where all of them have all of their rows."""
        return cls(capacities, device) if any(now < most for now, most in capacities) else None

    def begin_batch(self, counters: Tensor, is_next: Tensor) -> None:
        """Note ``counters [T, len(Counter)]`` before ids are inserted, where ``is_next``, bool
        ``[1]``, says that they are of another batch than those before."""
        self._new_before.copy_(torch.where(is_next, _num_new(counters), self._new_before))

    def end_batch(
        self, counters: Tensor, epoch: Tensor, last: Tensor, is_trained: Tensor | None
    ) -> None:
        """Note the counters after the ids were inserted.

        Args:
            counters: int64 ``[T, len(Counter)]``.
            epoch: int64 ``[1]``: of the batch.
            last: int64 ``[1]``: of the last batch that is trained.
            is_trained: bool ``[1]``: False where nothing may change; None: True.
        """
        num_new = _num_new(counters) - self._new_before
        expected = counters[:, Counter.SIZE] + _NUM_BATCHES * num_new
        wanted = capacity_for(expected)
        is_due = self._may_grow & (self._since == 0) & (wanted > self._rows)
        if is_trained is not None:
            is_due &= is_trained
        self._since.copy_(torch.where(is_due, epoch, self._since))
        self._wanted.copy_(torch.where(is_due, wanted, self._wanted))
        self.latest.copy_(self.at(last))

    def at(self, last: Tensor) -> Tensor:
        """int64 ``[T, 3]``, in new memory: whether a table may grow, 1 or 0; for those that are to,
        the batches since one brought too many ids, that one included, else 0; and the rows that
        they need.

        Args:
            last: int64 ``[1]``: the epoch of the last batch.
        """
        age = torch.where(self._since > 0, last - self._since + 1, 0)
        return torch.stack([self._may_grow.long(), age, self._wanted], 1)


def _num_new(counters: Tensor) -> Tensor:
    """New ids that were to get a row, int64 ``[T]``."""
    return counters[:, Counter.INSERTED] + counters[:, Counter.REFUSED]
