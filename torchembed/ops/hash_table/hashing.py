"""The two buckets of a table that may hold a key, as a function of the key's hash.

The hash of a key is a bijection, so that the order of hashes is one of keys too. Its high bits
choose the block: ``floor(h * num_blocks / 2**64)``, which grows with h, and which doubling the
blocks turns into twice that or one more. Its low bits choose two buckets in the block, different
ones where there are two or more, and the digest. Kernels in C++ and Triton repeat the arithmetic.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.random_bits import random_bits, shift_right

_LOW = (1 << 32) - 1


class KeyPlaces(NamedTuple):
    """Places where each of L keys may lie."""

    hashes: Tensor
    """int64 ``[L]``, the bits of an unsigned number."""
    blocks: Tensor
    """int64 ``[L]``: the block, within the table."""
    buckets: Tensor
    """int64 ``[L, 2]``: the first slots of its first and of its second bucket. They are equal where
    blocks have one bucket."""
    num_slots: Tensor
    """int64 ``[L]``: slots of a bucket; 0 where there is no key, or the table has no slots."""
    digests: Tensor
    """uint8 ``[L]``, 1 to 255."""


def hash_keys(keys: Tensor) -> Tensor:
    """The hashes of int64 ``keys``: int64, the bits of an unsigned number."""
    return random_bits(torch.zeros_like(keys), keys)


def locate_keys(keys: Tensor, tables: Tensor, geometry: Tensor) -> KeyPlaces:
    """Places of int64 ``keys [L]`` of ``tables [L]`` (-1 for no key) in the group."""
    # The row behind the last is that of a table without slots; index -1 reads it.
    of_table = torch.nn.functional.pad(geometry, (0, 0, 0, 1))[tables.long()]
    first_slot, num_blocks, num_buckets, num_slots = of_table.unbind(1)
    hashes = hash_keys(keys)
    low = hashes & _LOW
    # The high 64 bits of a product of 128, from halves: nothing exceeds 63 bits.
    block = (shift_right(hashes, 32) * num_blocks + shift_right(low * num_blocks, 32)) >> 32
    bucket = ((low & 0xFFFF) * num_buckets) >> 16
    step = 1 + ((((low >> 16) & 0xFF) * (num_buckets - 1)) >> 8)
    second = torch.where(num_buckets > 1, (bucket + step) % num_buckets.clamp_min(1), bucket)
    buckets = first_slot + (block * num_buckets + torch.stack([bucket, second])) * num_slots
    return KeyPlaces(hashes, block, buckets.t(), num_slots, _digests(low))


def key_digests(keys: Tensor) -> Tensor:
    """The digests of int64 ``keys [L]``: uint8 ``[L]``, 1 to 255."""
    return _digests(hash_keys(keys) & _LOW)


def _digests(low: Tensor) -> Tensor:
    """Digests by the low 32 bits of hashes."""
    return (1 + (((low >> 24) * 255) >> 8)).to(torch.uint8)
