"""Whole-number arithmetic of launches on the host.

Triton's functions of these names serve kernels too, and cost the host some microseconds a call.
"""


def cdiv(count: int, size: int) -> int:
    """Number of blocks of ``size`` that hold ``count`` elements."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """The smallest power of two that is not below ``count``, which is at least 1."""
    return 1 << (count - 1).bit_length()
