"""The state of a cache of rows, and what kernels and their callers share of it."""

import enum
from typing import NamedTuple, cast

import torch
from torch import Tensor


class CacheCounter(enum.IntEnum):
    """Elements of ``RowCache.counters``. Only batches that are trained count, those that were
    refused too."""

    UNIQUE_ROWS = 0
    """Distinct rows of each batch."""
    UNIQUE_MISSES = 1
    """Distinct rows of each batch that were not cached."""
    WRITTEN_ROWS = 2
    """Rows written back, since others took their slots or since all dirty ones were written."""
    READ_ROWS = 3
    """Rows that got a slot, which are read into it."""
    REFUSED_BATCHES = 4
    """Batches that needed more slots than were evictable."""


class RowCache(NamedTuple):
    """The slots, ``C`` of them, that hold some of ``R`` stored rows; any row may lie in any slot.

    A free slot has the row -1, the last use 0, and is neither recent nor dirty.
    """

    slot_of_row: Tensor
    """int32 ``[R]``: the slot of each row, -1 for rows that are not cached."""
    row_of_slot: Tensor
    """int64 ``[C]``: the row in each slot, -1 for a free slot."""
    last_use: Tensor
    """int64 ``[C]``: the epoch of the last batch that used the slot."""
    is_recent: Tensor
    """bool ``[C]``: whether a batch used the slot since the hand last passed it."""
    is_dirty: Tensor
    """bool ``[C]``: whether the slot's row may differ from the stored one."""
    hand: Tensor
    """int64 ``[1]``: the slot at which the search for slots to evict goes on."""
    counters: Tensor
    """int64, one for each :class:`CacheCounter`."""


class SlotClaim(NamedTuple):
    """Arguments of ``torchembed::claim_slots``, as every kernel takes them, in the order of the
    schema; :func:`torchembed.ops.row_cache.claim_slots` says what they mean."""

    unique_rows: Tensor
    num_unique: Tensor
    epoch: Tensor
    released: Tensor
    is_trained: Tensor | None
    slot_of_row: Tensor
    row_of_slot: Tensor
    last_use: Tensor
    is_recent: Tensor
    is_dirty: Tensor
    hand: Tensor
    counters: Tensor
    """These seven are the cache's, and are changed."""

    @property
    def cache(self) -> RowCache:
        """The cache that is changed."""
        return RowCache(*self[5:])


class RowMove(NamedTuple):
    """Arguments of ``torchembed::move_rows``, likewise;
    see :func:`torchembed.ops.row_cache.move_rows`."""

    slots: Tensor
    written_rows: Tensor
    read_rows: Tensor
    count: Tensor
    cached: list[Tensor]
    stored: list[Tensor]
    """Both lists are changed."""


REGION_BITS = 16
"""Places of stored rows lie in regions of as many as this many bits count. A GPU that goes through
regions in order translates their addresses nearly as fast as those of places in order, which would
take more to sort."""


class PlaceExchange(NamedTuple):
    """Arguments of ``torchembed::exchange_places``, likewise;
    see :func:`torchembed.ops.row_cache.exchange_places`."""

    slots: Tensor
    written_rows: Tensor
    read_rows: Tensor
    count: Tensor
    place_of_row: Tensor
    """Is changed."""


PlaceResults = tuple[Tensor, Tensor, Tensor]
"""Results of ``torchembed::exchange_places``: slots, and the places written and read."""


ClaimResults = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Results of ``torchembed::claim_slots``: the four of
:class:`torchembed.ops.row_cache.RowMoves`, and the number of slots that were too few."""


def empty_claim(unique_rows: Tensor, num_slots: int) -> ClaimResults:
    """Memory of the results for ``unique_rows [L]`` and a cache of ``num_slots``, not filled."""
    num_moves = cast("int", torch.sym_min(unique_rows.shape[0], num_slots))
    return (
        unique_rows.new_empty(num_moves, dtype=torch.int32),
        unique_rows.new_empty(num_moves, dtype=torch.int64),
        unique_rows.new_empty(num_moves, dtype=torch.int64),
        unique_rows.new_empty(1, dtype=torch.int64),
        unique_rows.new_empty(1, dtype=torch.int64),
    )
