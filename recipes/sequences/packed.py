"""Batches of histories without padding between them, all of one shape."""

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.sequences.interactions import Interactions
from torchembed.models import Histories

HELD_OUT = 1
"""The last items of each user, which are not trained."""


class HistoryWindows:
    """The newest items of each user before some that are left out, and what followed each.

    Args:
        data: all users' items.
        max_length: most items of a history.
        num_left_out: last items of a user that no history holds and none predicts.
    """

    def __init__(self, data: Interactions, *, max_length: int, num_left_out: int) -> None:
        self.data = data
        first, last = data.offsets[:-1], data.offsets[1:] - num_left_out
        # The last item that is left predicts nothing.
        self.lengths = (last - 1 - first).clamp(0, max_length)
        self.starts = last - 1 - self.lengths

    def batch(self, users: Tensor, *, num_users: int, capacity: int) -> Histories:
        """The histories of ``users``, and empty ones up to ``num_users``; places for items up to
        ``capacity``."""
        lengths = F.pad(self.lengths[users], (0, num_users - len(users)))
        offsets = F.pad(lengths.cumsum(0), (1, 0))
        num_items = int(offsets[-1])
        shifts = F.pad(self.starts[users], (0, num_users - len(users))) - offsets[:-1]
        places = torch.arange(num_items) + shifts.repeat_interleave(lengths)
        spare = (0, capacity - num_items)

        def at(values: Tensor | None, places: Tensor) -> Tensor | None:
            return None if values is None else F.pad(values[places], spare)

        items, next_items = at(self.data.items, places), at(self.data.items, places + 1)
        assert items is not None and next_items is not None
        times, next_times = at(self.data.times, places), at(self.data.times, places + 1)
        return Histories(items, offsets, next_items, times, next_times)


class PackedBatches:
    """One rank's batches of the histories of some users, in order.

    Args:
        windows: all histories.
        users: whose, int64 ``[n]``.
        batch_size: users of a batch over all ranks, of which each takes an equal part.
        capacity: items that a batch has places for; no batch may have more.
        rank: this rank.
        num_ranks: how many there are.
    """

    def __init__(
        self,
        windows: HistoryWindows,
        users: Tensor,
        *,
        batch_size: int,
        capacity: int,
        rank: int,
        num_ranks: int,
    ) -> None:
        self._windows, self._capacity = windows, capacity
        self._num_users = batch_size // num_ranks
        self._parts = _parts(users, batch_size, num_ranks)[rank::num_ranks]

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Histories]:
        is_pinned = torch.cuda.is_available()
        for users in self._parts:
            batch = self._windows.batch(users, num_users=self._num_users, capacity=self._capacity)
            yield batch.mapped(Tensor.pin_memory) if is_pinned else batch


def needed_capacity(
    windows: HistoryWindows, orders: Iterable[Tensor], *, batch_size: int, num_ranks: int
) -> int:
    """The most items of a rank's batch in any epoch, rounded up to a multiple of 8.

    Args:
        orders: the users of each epoch in order, int64 ``[n]`` each.
    """
    most = max(
        int(windows.lengths[users].sum())
        for order in orders
        for users in _parts(order, batch_size, num_ranks)
    )
    return -(-most // 8) * 8


def _parts(users: Tensor, batch_size: int, num_ranks: int) -> list[Tensor]:
    """The users of each rank's part of each batch, one rank after the other."""
    size = batch_size // num_ranks
    return [
        part
        for batch in users.split(batch_size)
        for part in (batch[rank * size : (rank + 1) * size] for rank in range(num_ranks))
    ]
