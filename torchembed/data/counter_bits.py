"""``core.random_bits`` on numpy arrays.

Readers run in threads while a step is trained. numpy works in the calling thread alone, where torch
would start a team of threads for each of them.
"""

import numpy as np
from numpy.typing import NDArray

from torchembed.core.random_bits import GOLDEN, MIX_FIRST, MIX_SECOND

_MASK = (1 << 64) - 1


def counter_bits(key: int, counter: NDArray[np.integer]) -> NDArray[np.uint64]:
    """64 random bits for ``key`` and each ``counter``: those of ``core.random_bits``."""
    value = counter.astype(np.uint64)
    value *= np.uint64(GOLDEN)
    value += np.uint64((key + GOLDEN) & _MASK)
    value ^= value >> np.uint64(30)
    value *= np.uint64(MIX_FIRST)
    value ^= value >> np.uint64(27)
    value *= np.uint64(MIX_SECOND)
    value ^= value >> np.uint64(31)
    return value


def unit_uniform(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Float64 in [0, 1) from the upper 53 bits of each word."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def nearly_normal(bits: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Float32 with mean 0 and variance 1: the sum of the word's four 16-bit numbers, scaled."""
    low_halves = np.uint64(0x0000FFFF0000FFFF)
    pairs = (bits & low_halves) + (bits >> np.uint64(16) & low_halves)
    total = (pairs + (pairs >> np.uint64(32))).astype(np.uint32).astype(np.float32)
    return (total - np.float32(2 * 65535)) * np.float32(3**0.5 / 65536)
