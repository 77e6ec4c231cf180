"""Binary search in sorted tensors, inside kernels."""

import triton
import triton.language as tl


@triton.jit
def count_not_above(entries_ptr, num_entries, value, stride, scale):
    """How many of ``scale * entries[i * stride]``, ``i < num_entries``, are at most ``value``.

    The entries do not decrease. ``value`` is a block; its elements are searched for side by side.

    Example: among entries 0 2 2 5, the value 2 gives 3.
    """
    count = tl.zeros_like(value)
    remaining = tl.full([], num_entries, tl.int64)
    while remaining > 0:
        half = (remaining + 1) // 2
        middle = (count + half - 1).to(tl.int64)
        entry = tl.load(entries_ptr + middle * stride).to(tl.int64) * scale
        count = tl.where(entry <= value, count + half, count).to(value.dtype)
        remaining -= half
    return count
