"""Counters of tables, inside kernels."""

import triton
import triton.language as tl

from torchembed.core.hash_tables import Counter

_NUM_COUNTERS = tl.constexpr(len(Counter))


@triton.jit
def count_by_table(table, is_counted, counters_ptr, COUNTER: tl.constexpr, SIGN: tl.constexpr):
    """Add the number of ``is_counted`` positions of each table, times SIGN, to its COUNTER.

    One pass for each table that the block holds: ids come by feature, so they are few.

    Example: tables 1 0 1, all counted: counter of table 0 grows by 1, of table 1 by 2.
    """
    nothing = 0x7FFFFFFF
    of_id = tl.where(is_counted, table, nothing)
    current = tl.min(of_id, axis=0)
    while current < nothing:
        number = tl.sum((of_id == current).to(tl.int64), axis=0) * SIGN
        counter_ptr = counters_ptr + current.to(tl.int64) * _NUM_COUNTERS + COUNTER
        tl.atomic_add(counter_ptr, number, sem="relaxed")
        current = tl.min(tl.where(of_id > current, of_id, nothing), axis=0)
