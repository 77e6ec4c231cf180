"""What tables in host memory take on the device and on the host."""

from typing import NamedTuple

from torchembed.tables import HostMemory

ROW_NUMBER_BYTES = 4
"""Memory of a cache, on the device, for each row that is stored: the number of its slot."""
SLOT_BYTES = 18
"""Memory of a cache for each of its slots, beside the row: which row it holds, and its use."""
ROUNDED_SLOT_BYTES = 24
"""Memory for each slot of the keys of rounding, where updates round rows: a key, an offset and a
column."""


class HeldRows(NamedTuple):
    """How many rows of a shard are where."""

    on_device: int
    in_host: int = 0
    index_bytes: int = 0
    """Memory on the device of what finds cached rows."""


def held_rows(
    storage: HostMemory | None, num_rows: int, line_bytes: int, *, is_rounded: bool
) -> HeldRows:
    """Where ``num_rows`` are, each of ``line_bytes`` with its optimizer state.

    Args:
        is_rounded: True where updates round rows.
    """
    if storage is None:
        return HeldRows(num_rows)
    cached = storage.cache_rows
    if cached is None:
        assert storage.cache_bytes is not None
        cached = max(storage.cache_bytes // line_bytes, 1)
    cached = min(cached, num_rows)
    return HeldRows(cached, num_rows, cache_index_bytes(cached, num_rows, is_rounded=is_rounded))


def cache_index_bytes(num_cached: int, num_rows: int, *, is_rounded: bool) -> int:
    """Bytes that a cache of ``num_cached`` of ``num_rows`` takes on the device beside them."""
    slot_bytes = SLOT_BYTES + (ROUNDED_SLOT_BYTES if is_rounded else 0)
    return num_rows * ROW_NUMBER_BYTES + num_cached * slot_bytes
