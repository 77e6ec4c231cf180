"""The partition of a key: which of several places holds it, or carries its messages."""

import torch
from torch import Tensor


def partition_of(keys: Tensor, num_partitions: int) -> Tensor:
    """The partition of each key, by the hash that HugeCTR's parameter server divides keys by.

    It is rrxmrrxmsx_0 (https://mostlymangling.blogspot.com/2018/07/
    on-mixing-functions-in-fast-splittable.html) of the key as 64 unsigned bits, modulo
    ``num_partitions``: of ``x``, with products modulo 2^64 and ``ror`` for rotation to the right,

    ``x ^= ror(x, 25) ^ ror(x, 50); x *= 0xA24BAED4963EE407;``
    ``x ^= ror(x, 24) ^ ror(x, 49); x *= 0x9FB21C651E98DF25; x ^= x >> 28``

    Key 1 gives 985,654,925,471,400,243, so that of 8 partitions it has number 3.

    Args:
        keys: int64 ``[n]``, any numbers, on any device; a GPU is not waited for.
        num_partitions: from 1 on.

    Returns:
        int64 ``[n]``, each at least 0 and below ``num_partitions``.
    """
    if keys.dtype != torch.int64:
        raise TypeError(f"keys must be int64, got {keys.dtype}; call .long()")
    if num_partitions < 1:
        raise ValueError(f"num_partitions must be at least 1, got {num_partitions}")
    x = keys ^ _rotated_right(keys, 25) ^ _rotated_right(keys, 50)
    x = x * (0xA24BAED4963EE407 - 2**64)
    x = x ^ _rotated_right(x, 24) ^ _rotated_right(x, 49)
    x = x * (0x9FB21C651E98DF25 - 2**64)
    x = x ^ _shifted_right(x, 28)
    # The remainder of 64 unsigned bits: of the upper 63, doubled, and the last.
    return (_shifted_right(x, 1).remainder(num_partitions) * 2 + (x & 1)).remainder(num_partitions)


def _shifted_right(x: Tensor, num_bits: int) -> Tensor:
    """``x >> num_bits`` of unsigned numbers."""
    return (x >> num_bits) & ((1 << (64 - num_bits)) - 1)


def _rotated_right(x: Tensor, num_bits: int) -> Tensor:
    return _shifted_right(x, num_bits) | (x << (64 - num_bits))
