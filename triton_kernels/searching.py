"""Binary search in sorted tensors, inside kernels."""

import triton
import triton.language as tl


@triton.jit
def count_not_above(entries_ptr, num_entries, value, stride, scale):
    """Number of ``scale * entries[i * stride]``, ``i < num_entries``, that are at most ``value``.

    The entries do not decrease. ``value`` is a block, whose elements are searched for in parallel.

    Example: among entries 0 2 2 5, the value 2 gives 3.
    """
    count = tl.zeros_like(value)
    # All lanes take the same number of steps: each halves the range, whatever the comparison says.
    remaining = tl.full([], num_entries, tl.int64)
    while remaining > 0:
        half = (remaining + 1) // 2
        middle = (count + half - 1).to(tl.int64)
        entry = tl.load(entries_ptr + middle * stride).to(tl.int64) * scale
        count = tl.where(entry <= value, count + half, count).to(value.dtype)
        remaining -= half
    return count


@triton.jit
def count_not_above_each(entries_ptr, num_entries, first, stride, scale, BLOCK: tl.constexpr):
    """:func:`count_not_above` of each of ``first + [0, BLOCK)``.

    One search serves a block without an entry among its numbers, as most blocks are: the count of
    its first number is that of all.

    Example: among entries 0 2 2 7, four numbers from 2 on are 3 each.
    """
    count = count_not_above(entries_ptr, num_entries, first, stride, scale)
    has_next = count < num_entries
    next_entry = tl.load(entries_ptr + count.to(tl.int64) * stride, mask=has_next, other=0)
    if has_next & (next_entry.to(tl.int64) * scale < first + BLOCK):
        values = first + tl.arange(0, BLOCK)
        counts = count_not_above(entries_ptr, num_entries, values, stride, scale)
    else:
        counts = tl.zeros([BLOCK], count.dtype) + count
    return counts
