"""Places of keys of hash tables, inside kernels: the arithmetic of
:mod:`torchembed.ops.hash_table.hashing`."""

import triton
import triton.language as tl

from torchembed.triton_kernels.random_bits import random_bits


@triton.jit
def hash_of_key(key):
    """The hash of each int64 ``key``, uint64."""
    return random_bits(tl.zeros_like(key), key)


@triton.jit
def block_of_hash(hashed, num_blocks):
    """The block of each ``hashed``, int64: the high 64 bits of its product with ``num_blocks``."""
    low = (hashed & 0xFFFFFFFF).to(tl.int64)
    high = (hashed >> 32).to(tl.int64)
    return (high * num_blocks + ((low * num_blocks) >> 32)) >> 32


@triton.jit
def buckets_of_hash(hashed, first_slot, num_blocks, num_buckets, num_slots):
    """The first slots, int64, of both buckets of each ``hashed``; equal where a block has one.

    Example: hash 0 of a table from slot 8 on, of blocks of two buckets of 4: 8 and 12.
    """
    low = (hashed & 0xFFFFFFFF).to(tl.int64)
    bucket = ((low & 0xFFFF) * num_buckets) >> 16
    other = bucket + 1 + ((((low >> 16) & 0xFF) * (num_buckets - 1)) >> 8)
    # Less than twice as many as there are, so a subtraction takes the place of a remainder.
    other = tl.where(other >= num_buckets, other - num_buckets, other)
    before = block_of_hash(hashed, num_blocks) * num_buckets
    first = first_slot + (before + bucket) * num_slots
    second = first_slot + (before + other) * num_slots
    return first, tl.where(num_buckets > 1, second, first)


@triton.jit
def digest_of_hash(hashed):
    """The digest of each ``hashed``, int32, 1 to 255."""
    return 1 + ((((hashed >> 24) & 0xFF).to(tl.int32) * 255) >> 8)
