"""The memory that rows of a ``VolatileMemoryStore`` take, known before they are written."""

import math

from torchembed.ops.hash_table import BLOCK_SLOTS
from torchembed.stores.volatile.options import OverflowPolicy, VolatileOptions

_SLOT_BYTES = 25
"""Bytes of a slot of the index: a key, its digest, the time of its last access, and the number of
its row."""
_COUNT_BYTES = 8
_MOVE_BYTES = 8
"""For each slot of the index before it grows, while it does."""
_LEAST_LOAD = 0.9
"""Share of slots in use from which on the index may double."""


def volatile_memory_bytes(
    num_rows: int, line_bytes: int, options: VolatileOptions | None = None
) -> int:
    """The most bytes that a table of a :class:`~torchembed.stores.VolatileMemoryStore` takes while
    it is filled.

    Lines take up to an eighth more than their bytes, since their array grows by that, and keys 28
    to 56 bytes each (36 to 73 where accesses are counted), since the index doubles; while it does,
    the old one is there as well. For rows of 512 bytes the sum is at most 1.3 times their bytes.

    Args:
        num_rows: that are written, of which a bounded table keeps fewer.
        line_bytes: of each.
        options: of the store.
    """
    options = options or VolatileOptions()
    num_partitions, per_partition = options.num_partitions, num_rows / options.num_partitions
    # Keys are divided by a hash: so many more are in the fullest partition, in all likelihood.
    fullest = per_partition + 4 * math.sqrt(per_partition) * (num_partitions > 1)
    margin = options.overflow_margin_rows
    if margin is not None:
        # A batch is written before the rows beyond the margin go.
        fullest = min(fullest, margin + options.max_batch_rows)
        num_rows = min(num_rows, margin * num_partitions + options.max_batch_rows)
    slots_each, num_doublings = BLOCK_SLOTS, 0
    while slots_each * _LEAST_LOAD < fullest:
        slots_each, num_doublings = 2 * slots_each, num_doublings + 1
    num_slots = slots_each * num_partitions
    is_counted = options.overflow_policy is OverflowPolicy.EVICT_LEAST_USED
    slot_bytes = _SLOT_BYTES + is_counted * _COUNT_BYTES
    line_growth = line_bytes * 9 // 8 + 1
    filled = num_rows * line_growth + num_slots * slot_bytes
    if not num_doublings:
        return filled
    before = num_slots // 2
    growing = min(num_rows, before) * line_growth + num_slots * slot_bytes
    return max(filled, growing + before * (slot_bytes + _MOVE_BYTES))
