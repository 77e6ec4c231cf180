"""Counter-based random bits: a pure function of (key, counter), on any device and number of ranks.

The initial values of a row and the rounding of a 16-bit row are drawn from here with a counter
that names the row and the column, so a table's contents never depend on how it is sharded.

The mixer is the finalizer of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014, with Stafford's variant 13 of the constants), evaluated on
``key + (counter + 1) * GOLDEN`` modulo 2**64. Kernels in C++ and Triton repeat the same arithmetic.
"""

import hashlib

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MIX_FIRST = 0xBF58476D1CE4E5B9
MIX_SECOND = 0x94D049BB133111EB
SHARE_KEY = 1
"""Key of the hash that chooses which rank holds an id. It is not the one of hash tables (0), so
that the ids of a rank spread over all blocks and buckets of its table."""


def signed64(value: int) -> int:
    """The int64 whose bits are those of ``value`` modulo 2**64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 ``value`` by ``bits``: zeros are shifted in."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def mix64(value: Tensor) -> Tensor:
    """SplitMix64's finalizer of int64 ``value`` (any shape), elementwise, as int64 bits."""
    value = (value ^ shift_right(value, 30)) * signed64(MIX_FIRST)
    value = (value ^ shift_right(value, 27)) * signed64(MIX_SECOND)
    return value ^ shift_right(value, 31)


def random_bits(key: Tensor, counter: Tensor) -> Tensor:
    """64 random bits, int64, for each broadcast pair of int64 ``key`` and ``counter``."""
    return mix64(key + (counter + 1) * signed64(GOLDEN))


def random_uniform(key: Tensor, counter: Tensor) -> Tensor:
    """Float32 in [0, 1) with 24 bits of resolution for each pair of ``key`` and ``counter``."""
    return shift_right(random_bits(key, counter), 40).to(torch.float32) * (1.0 / (1 << 24))


def name_key(seed: int, *names: str) -> int:
    """A 64-bit signed key for ``seed`` and ``names``, the same in every process (SHA-256)."""
    text = "\0".join((str(seed), *names)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little", signed=True)
