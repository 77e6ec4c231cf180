"""The Triton kernel of ``find_slots``.

Byte floor for each key: 12 bytes of the key and its table, a bucket's digests (128 bytes), the
sector of 32 bytes that holds the key, and 8 bytes of the slot, so 180 where its first bucket holds
it. The second bucket's digests are read only where the first one does not, 128 bytes more. One of
255 digests is equal by chance, which reads the sector of another key.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.core.hash_tables import BUCKET_SLOTS
from torchembed.triton_kernels.hash_places import buckets_of_hash, digest_of_hash, hash_of_key
from torchembed.triton_kernels.launch_sizes import cdiv

# Keys that a program takes: each of 4 warps' threads holds 32 digests, two accesses of 16 bytes.
_BLOCK = 32


@triton.jit
def _place_in_bucket(
    key, digest, first, num_slots, wanted, digests_ptr, slot_keys_ptr, BUCKET: tl.constexpr
):
    """The place of each ``wanted`` key in its bucket, which begins at slot ``first``; -1 for none.

    Example: a bucket of two slots with digests 9 9 and keys 4 5: key 5 of digest 9 has place 1.
    """
    place = tl.arange(0, BUCKET)
    slot = first[:, None] + place[None, :]
    # Whole buckets at whole addresses are read 16 digests at a time.
    is_whole = (num_slots == BUCKET) & ((first & 15) == 0)
    if tl.min((is_whole | (wanted == 0)).to(tl.int32)) == 1:
        aligned = tl.multiple_of(first[:, None] + place[None, :], [1, 16])
        found = tl.load(digests_ptr + aligned, mask=wanted[:, None], other=0)
    else:
        inside = wanted[:, None] & (place[None, :] < num_slots[:, None])
        found = tl.load(digests_ptr + slot, mask=inside, other=0)
    may_hold = found.to(tl.int32) == digest[:, None]
    held = tl.load(slot_keys_ptr + slot, mask=may_hold, other=0)
    holds = may_hold & (held == key[:, None])
    return tl.max(tl.where(holds, place[None, :], -1), axis=1)


@triton.jit
def slots_of_keys(
    key,
    wanted,
    first_slot,
    num_blocks,
    num_buckets,
    num_slots,
    digests_ptr,
    slot_keys_ptr,
    BUCKET: tl.constexpr,
):
    """The slot that holds each ``wanted`` key of a table of this geometry, int64; -1 for none."""
    hashed = hash_of_key(key)
    digest = digest_of_hash(hashed)
    first, second = buckets_of_hash(hashed, first_slot, num_blocks, num_buckets, num_slots)
    place = _place_in_bucket(
        key, digest, first, num_slots, wanted, digests_ptr, slot_keys_ptr, BUCKET
    )
    slot = tl.where(place >= 0, first + place, -1)
    missing = wanted & (place < 0) & (second != first)
    if tl.max(missing.to(tl.int32)) == 1:
        place = _place_in_bucket(
            key, digest, second, num_slots, missing, digests_ptr, slot_keys_ptr, BUCKET
        )
        slot = tl.where(place >= 0, second + place, slot)
    return slot


@triton.jit(do_not_specialize=["num_ids"])
def _find_slots_kernel(
    keys_ptr,
    tables_ptr,
    digests_ptr,
    slot_keys_ptr,
    geometry_ptr,
    slots_ptr,
    num_ids,
    BUCKET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``slots[p]``: the slot that holds ``keys[p]`` in table ``tables[p]``, -1 for none.

    Example: a table of one bucket of 4 slots, whose slot 2 holds key 7: ``keys = [7, 8]`` give
    ``slots = [2, -1]``.
    """
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < num_ids
    key = tl.load(keys_ptr + position, mask=inside, other=0)
    table = tl.load(tables_ptr + position, mask=inside, other=-1)
    wanted = table >= 0
    shape_ptr = geometry_ptr + table.to(tl.int64) * 4
    first_slot = tl.load(shape_ptr, mask=wanted, other=0)
    num_blocks = tl.load(shape_ptr + 1, mask=wanted, other=0)
    num_buckets = tl.load(shape_ptr + 2, mask=wanted, other=0)
    num_slots = tl.load(shape_ptr + 3, mask=wanted, other=0)

    slot = slots_of_keys(
        key,
        wanted,
        first_slot,
        num_blocks,
        num_buckets,
        num_slots,
        digests_ptr,
        slot_keys_ptr,
        BUCKET,
    )
    tl.store(slots_ptr + position, slot, mask=inside)


def find_slots_into(
    slots: Tensor,
    keys: Tensor,
    tables: Tensor,
    digests: Tensor,
    slot_keys: Tensor,
    geometry: Tensor,
) -> None:
    """Write the result of :func:`launch_find_slots` to ``slots``, int64 ``[L]``."""
    num_ids = keys.numel()
    if num_ids == 0:
        return
    with torch.cuda.device_of(keys):
        _find_slots_kernel[(cdiv(num_ids, _BLOCK),)](
            keys,
            tables,
            digests,
            slot_keys,
            geometry,
            slots,
            num_ids,
            BUCKET=BUCKET_SLOTS,
            BLOCK=_BLOCK,
        )


def launch_find_slots(
    keys: Tensor, tables: Tensor, digests: Tensor, slot_keys: Tensor, geometry: Tensor
) -> Tensor:
    """``torchembed::find_slots``; see :func:`torchembed.ops.hash_table.find_slots`."""
    slots = torch.empty_like(keys)
    find_slots_into(slots, keys, tables, digests, slot_keys, geometry)
    return slots
