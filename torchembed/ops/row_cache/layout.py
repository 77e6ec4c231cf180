"""Making and emptying caches of rows."""

import torch

from torchembed.core import checks
from torchembed.core.row_caches import CacheCounter, RowCache

MAX_SLOTS = 2**31
"""Slots are int32, so that a cache has fewer than these."""


def empty_row_cache(
    num_rows: int, num_slots: int, device: torch.device | str | None = None
) -> RowCache:
    """A cache of ``num_slots`` free slots for ``num_rows`` stored rows, nothing counted yet.

    Raises:
        ValueError: for a negative number of rows, and for no slots or 2**31 of them or more.
    """
    checks.check_not_negative("num_rows", num_rows)
    if not 1 <= num_slots < MAX_SLOTS:
        raise ValueError(f"num_slots must be in [1, {MAX_SLOTS}), got {num_slots}")
    numbers = {"dtype": torch.int64, "device": device}
    flags = {"dtype": torch.bool, "device": device}
    return RowCache(
        slot_of_row=torch.full((num_rows,), -1, dtype=torch.int32, device=device),
        row_of_slot=torch.full((num_slots,), -1, **numbers),
        last_use=torch.zeros(num_slots, **numbers),
        is_recent=torch.zeros(num_slots, **flags),
        is_dirty=torch.zeros(num_slots, **flags),
        hand=torch.zeros(1, **numbers),
        counters=torch.zeros(len(CacheCounter), **numbers),
    )


def forget_rows(cache: RowCache) -> None:
    """Free every slot of ``cache``; rows that were not written back are lost.

    The hand returns to slot 0, and the counters stay. Never synchronizes.
    """
    for rows in (cache.slot_of_row, cache.row_of_slot):
        rows.fill_(-1)
    for state in (cache.last_use, cache.is_recent, cache.is_dirty, cache.hand):
        state.zero_()
