"""Binary search in sorted tensors, inside kernels."""

import triton
import triton.language as tl

from torchembed.triton_kernels.launch_sizes import next_power_of_2


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
def _count_not_above_at_once(
    entries_ptr, num_entries, value, stride, scale, MOST_ENTRIES: tl.constexpr
):
    """:func:`count_not_above` of one number among at most MOST_ENTRIES, a power of two: all are
    loaded at once, where a search would wait for one load after the other."""
    number = tl.arange(0, MOST_ENTRIES)
    inside = number < num_entries
    entry = tl.load(entries_ptr + number.to(tl.int64) * stride, mask=inside, other=0)
    is_counted = inside & (entry.to(tl.int64) * scale <= value)
    return tl.sum(is_counted.to(tl.int32), axis=0).to(value.dtype)


@triton.jit
def count_not_above_each(
    entries_ptr, num_entries, first, stride, scale, BLOCK: tl.constexpr, MOST_ENTRIES: tl.constexpr
):
    """:func:`count_not_above` of each of ``first + [0, BLOCK)``.

    One count serves a block without an entry among its numbers, as most blocks are: that of its
    first number is that of all. MOST_ENTRIES, a power of two, is no less than the number of
    entries; 0 for any number.

    Example: among entries 0 2 2 7, four numbers from 2 on are 3 each.
    """
    if MOST_ENTRIES > 0:
        count = _count_not_above_at_once(
            entries_ptr, num_entries, first, stride, scale, MOST_ENTRIES
        )
    else:
        count = count_not_above(entries_ptr, num_entries, first, stride, scale)
    has_next = count < num_entries
    next_entry = tl.load(entries_ptr + count.to(tl.int64) * stride, mask=has_next, other=0)
    if has_next & (next_entry.to(tl.int64) * scale < first + BLOCK):
        values = first + tl.arange(0, BLOCK)
        counts = count_not_above(entries_ptr, num_entries, values, stride, scale)
    else:
        counts = tl.zeros([BLOCK], count.dtype) + count
    return counts


_MOST_AT_ONCE = 1024


def most_entries(num_entries: int) -> int:
    """``MOST_ENTRIES`` of :func:`count_not_above_each` for ``num_entries``."""
    return next_power_of_2(max(num_entries, 1)) if num_entries <= _MOST_AT_ONCE else 0
