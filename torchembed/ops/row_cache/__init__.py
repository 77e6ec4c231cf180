"""A cache, on the device, of rows that are stored elsewhere: in memory of the host that a GPU can
reach, for one."""

from torchembed.core.row_caches import CacheCounter, RowCache
from torchembed.ops.row_cache.function import (
    ClaimedSlots,
    RowMoves,
    claim_slots,
    dirty_moves,
    exchange_places,
    find_cached,
    move_rows,
    read_rows,
)
from torchembed.ops.row_cache.layout import empty_row_cache, forget_rows

__all__ = [
    "CacheCounter",
    "ClaimedSlots",
    "RowCache",
    "RowMoves",
    "claim_slots",
    "dirty_moves",
    "empty_row_cache",
    "exchange_places",
    "find_cached",
    "forget_rows",
    "move_rows",
    "read_rows",
]
