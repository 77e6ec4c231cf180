"""The counter-based random bits of :mod:`torchembed.core.random_bits`, inside kernels."""

import triton
import triton.language as tl

from torchembed.core import random_bits as specification

_GOLDEN = tl.constexpr(specification.GOLDEN)
_MIX_FIRST = tl.constexpr(specification.MIX_FIRST)
_MIX_SECOND = tl.constexpr(specification.MIX_SECOND)


@triton.jit
def random_bits(key, counter):
    """64 random bits, uint64, for each broadcast pair of ``key`` and ``counter``."""
    value = key.to(tl.uint64) + (counter.to(tl.uint64) + 1) * _GOLDEN
    value = (value ^ (value >> 30)) * _MIX_FIRST
    value = (value ^ (value >> 27)) * _MIX_SECOND
    return value ^ (value >> 31)
