"""The Triton kernels of ``erase_keys``, which come after that of ``find_slots``.

Byte floor for each id beyond finding it: 12 bytes of its slot and table read and 8 of the result
written, and for each distinct slot the sectors of 32 bytes that hold its digest, key, epoch and
score, written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.core.hash_tables import Counter, KeyErasure
from torchembed.triton_kernels.find_slots import launch_find_slots
from torchembed.triton_kernels.launch_sizes import cdiv
from torchembed.triton_kernels.table_counters import count_by_table

_SIZE = tl.constexpr(int(Counter.SIZE))
_ERASED = tl.constexpr(int(Counter.ERASED))
_IN_USE = tl.constexpr(int(Counter.IN_USE))
_MARK = tl.constexpr(-(2**63))
_GREATEST = tl.constexpr(2**63 - 1)
_BLOCK = 1024


@triton.jit(do_not_specialize=["num_ids"])
def _erase_keys_mark_kernel(
    slots_ptr,
    tables_ptr,
    released_ptr,
    touched_ptr,
    counters_ptr,
    erased_ptr,
    num_ids,
    BLOCK: tl.constexpr,
):
    """``erased[p]``: the slot of position p whose row is not in use, else -1; and count each key
    once. The sign bit of its epoch says that a position of it was counted.

    Example: slots 2 2 -1 of table 0, touched in epoch 3, ``released = 3``: erased 2 2 -1, SIZE less
    by 1, ERASED more by 1. With ``released = 2``: erased -1 -1 -1, IN_USE more by 1.
    """
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < num_ids
    slot = tl.load(slots_ptr + position, mask=inside, other=-1)
    table = tl.load(tables_ptr + position, mask=inside, other=-1)
    is_held = slot >= 0
    mark = tl.full([BLOCK], _MARK, tl.int64)
    old = tl.atomic_or(touched_ptr + slot, mark, mask=is_held, sem="relaxed")
    in_use = (old & _GREATEST) > tl.load(released_ptr)
    is_first = is_held & (old >= 0)
    is_erased = is_first & (in_use == 0)
    count_by_table(table, is_erased, counters_ptr, _ERASED, 1)
    count_by_table(table, is_erased, counters_ptr, _SIZE, -1)
    count_by_table(table, is_first & in_use, counters_ptr, _IN_USE, 1)
    tl.store(erased_ptr + position, tl.where(in_use, -1, slot), mask=inside)


@triton.jit(do_not_specialize=["num_ids"])
def _erase_keys_kernel(
    slots_ptr,
    erased_ptr,
    digests_ptr,
    slot_keys_ptr,
    touched_ptr,
    scores_ptr,
    num_ids,
    BLOCK: tl.constexpr,
):
    """Clear the ``erased`` slots, and take the marks from the epochs of the others.

    Example: slot 2, erased: digest, key, epoch and score 0. Not erased, epoch 3 with the mark: 3.
    """
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < num_ids
    slot = tl.load(slots_ptr + position, mask=inside, other=-1)
    is_erased = tl.load(erased_ptr + position, mask=inside, other=-1) >= 0
    # All positions of a slot write the same.
    zero = tl.zeros([BLOCK], tl.int64)
    marked = tl.load(touched_ptr + slot, mask=slot >= 0, other=0)
    tl.store(touched_ptr + slot, tl.where(is_erased, 0, marked & _GREATEST), mask=slot >= 0)
    tl.store(digests_ptr + slot, zero.to(tl.uint8), mask=is_erased)
    tl.store(slot_keys_ptr + slot, zero, mask=is_erased)
    if scores_ptr is not None:
        tl.store(scores_ptr + slot, zero, mask=is_erased)


def launch_erase_keys(erasure: KeyErasure) -> Tensor:
    """``torchembed::erase_keys``; see :func:`torchembed.ops.hash_table.erase_keys`."""
    slots = launch_find_slots(
        erasure.keys, erasure.tables, erasure.digests, erasure.slot_keys, erasure.geometry
    )
    erased = torch.empty_like(slots)
    num_ids = erasure.keys.numel()
    if num_ids == 0:
        return erased
    grid = (cdiv(num_ids, _BLOCK),)
    with torch.cuda.device_of(erasure.keys):
        _erase_keys_mark_kernel[grid](
            slots,
            erasure.tables,
            erasure.released,
            erasure.touched,
            erasure.counters,
            erased,
            num_ids,
            BLOCK=_BLOCK,
        )
        _erase_keys_kernel[grid](
            slots,
            erased,
            erasure.digests,
            erasure.slot_keys,
            erasure.touched,
            erasure.scores,
            num_ids,
            BLOCK=_BLOCK,
        )
    return erased
