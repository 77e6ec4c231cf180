"""Functions of lookup kernels that count hits and misses, record the last use of slots, and sum the
ids without a row."""

import triton
import triton.language as tl

from torchembed.core.hash_tables import Counter
from torchembed.triton_kernels.table_counters import count_by_table

_HITS = tl.constexpr(int(Counter.HITS))
_MISSES = tl.constexpr(int(Counter.MISSES))
_ONE_PROGRAM = tl.constexpr(1 << 32)


@triton.jit
def note_uses(table, slot, is_hit, is_missing, counters_ptr, touched_ptr, epoch_ptr):
    """Count hits and misses of each table, and raise ``touched`` of each slot that is hit to the
    epoch that begins with this lookup; each where there is a pointer to it.

    Example: tables 0 0, slots 3 and none, epoch 5: a hit and a miss of table 0, ``touched[3] = 6``.
    """
    if counters_ptr is not None:
        count_by_table(table, is_hit, counters_ptr, _HITS, 1)
        count_by_table(table, is_missing, counters_ptr, _MISSES, 1)
    if touched_ptr is not None:
        epoch = tl.load(epoch_ptr) + 1 + tl.zeros_like(slot)
        # Most positions of a frequent slot see that another one was faster, and spare the atomic.
        seen = tl.load(touched_ptr + slot, mask=is_hit, other=0, cache_modifier=".cg")
        tl.atomic_max(touched_ptr + slot, epoch, mask=is_hit & (seen < epoch), sem="relaxed")


@triton.jit
def finish_notes(num_missed, progress_ptr, num_missing_ptr, epoch_ptr):
    """Add up ``num_missed`` of all programs, each of which calls it once, after its uses are noted.

    The last program to do so writes the sum, brings ``progress`` back to 0 and begins the next
    epoch, so that nothing need be set before a launch.

    Example: two programs that missed 1 and 2: ``num_missing = 3``.
    """
    # All threads have read the epoch before one of them may say that this program is done.
    tl.debug_barrier()
    before = tl.atomic_add(progress_ptr, num_missed + _ONE_PROGRAM)
    if (before >> 32) == tl.num_programs(0) - 1:
        tl.store(num_missing_ptr, (before & 0xFFFFFFFF) + num_missed)
        tl.store(progress_ptr, 0)
        if epoch_ptr is not None:
            tl.atomic_add(epoch_ptr, 1, sem="relaxed")
