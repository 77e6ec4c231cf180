"""The Triton kernels of ``touch_slots``.

Byte floor for each id: 12 bytes of its slot and its table, and for each distinct slot the sectors
of 32 bytes that hold its epoch and its score, read and written.
"""

import torch
import triton
import triton.language as tl

from torchembed.core.hash_tables import Counter, Policy, SlotTouch
from torchembed.triton_kernels.launch_sizes import cdiv
from torchembed.triton_kernels.table_counters import count_by_table

_HITS = tl.constexpr(int(Counter.HITS))
_MISSES = tl.constexpr(int(Counter.MISSES))
_EPOCH_LFU = tl.constexpr(int(Policy.EPOCH_LFU))
_CALLER = tl.constexpr(int(Policy.CALLER))
_MOST_COUNT = tl.constexpr((1 << 32) - 1)
_BLOCK = 1024


@triton.jit(do_not_specialize=["num_ids"])
def _touch_slots_kernel(
    slots_ptr,
    tables_ptr,
    epoch_ptr,
    is_trained_ptr,
    touched_ptr,
    scores_ptr,
    counters_ptr,
    overflows_ptr,
    num_ids,
    POLICY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Raise ``touched`` of each slot to the epoch, count hits and misses, and bring scores to where
    :func:`_finish_scores_kernel` goes on: counts of occurrences are added (LFU, EPOCH_LFU), and
    scores of the caller are the least number.

    Example: LFU, epoch 5, ``slots = [1, 1, -1]`` of table 0, scores 3 4: ``touched[1] = 5``, scores
    3 6, 2 hits and a miss.
    """
    if is_trained_ptr is not None:
        if tl.load(is_trained_ptr) == 0:
            return
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < num_ids
    table = tl.load(tables_ptr + position, mask=inside, other=-1)
    slot = tl.load(slots_ptr + position, mask=inside, other=-1)
    is_hit = (table >= 0) & (slot >= 0)
    count_by_table(table, is_hit, counters_ptr, _HITS, 1)
    count_by_table(table, (table >= 0) & (slot < 0), counters_ptr, _MISSES, 1)

    # Most positions of a frequent slot see that another one was faster, and spare the atomic.
    # Past the first-level cache, which does not see other programs' changes.
    epoch = tl.load(epoch_ptr) + tl.zeros([BLOCK], tl.int64)
    seen = tl.load(touched_ptr + slot, mask=is_hit, other=0, cache_modifier=".cg")
    tl.atomic_max(touched_ptr + slot, epoch, mask=is_hit & (seen < epoch), sem="relaxed")
    if POLICY == _CALLER:
        least = tl.full([BLOCK], -0x7FFFFFFFFFFFFFFF - 1, tl.int64)
        tl.store(scores_ptr + slot, least, mask=is_hit)
    elif scores_ptr is not None:
        one = tl.full([BLOCK], 1, tl.int64)
        old = tl.atomic_add(scores_ptr + slot, one, mask=is_hit, sem="relaxed")
        if POLICY == _EPOCH_LFU:
            # A sum past what the low half holds goes over to the high half once, at one position.
            overflows = is_hit & ((old & _MOST_COUNT) == _MOST_COUNT)
            tl.store(overflows_ptr + position, overflows.to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["num_ids"])
def _finish_scores_kernel(
    slots_ptr,
    tables_ptr,
    epoch_number_ptr,
    scores_in_ptr,
    is_trained_ptr,
    scores_ptr,
    overflows_ptr,
    num_ids,
    POLICY: tl.constexpr,
    OVERFLOWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Make scores what the policy says, after :func:`_touch_slots_kernel`: the greatest number of
    the caller, or the epoch number above the count; where OVERFLOWS, the greatest count for those
    slots whose count went past it.

    Example: EPOCH_LFU, epoch number 2, ``slots = [0, 0]``, score ``1 << 32 | 5``: ``2 << 32 | 5``.
    """
    if is_trained_ptr is not None:
        if tl.load(is_trained_ptr) == 0:
            return
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < num_ids
    table = tl.load(tables_ptr + position, mask=inside, other=-1)
    slot = tl.load(slots_ptr + position, mask=inside, other=-1)
    is_hit = (table >= 0) & (slot >= 0)
    if POLICY == _CALLER:
        given = tl.load(scores_in_ptr + position, mask=is_hit, other=0)
        tl.atomic_max(scores_ptr + slot, given, mask=is_hit, sem="relaxed")
    elif OVERFLOWS:
        overflows = tl.load(overflows_ptr + position, mask=is_hit, other=0) != 0
        greatest = (tl.load(epoch_number_ptr) << 32) + tl.full([BLOCK], _MOST_COUNT, tl.int64)
        tl.store(scores_ptr + slot, greatest, mask=is_hit & overflows)
    else:
        # All positions of a slot write one number, whichever of them comes first.
        score = tl.load(scores_ptr + slot, mask=is_hit, other=0)
        score = (tl.load(epoch_number_ptr) << 32) + (score & _MOST_COUNT)
        tl.store(scores_ptr + slot, score, mask=is_hit)


def launch_touch_slots(touch: SlotTouch) -> None:
    """``torchembed::touch_slots``; see :func:`torchembed.ops.hash_table.touch_slots`."""
    num_ids = touch.slots.numel()
    if num_ids == 0:
        return
    grid = (cdiv(num_ids, _BLOCK),)
    is_epoch_lfu = touch.policy == Policy.EPOCH_LFU
    overflows = torch.empty_like(touch.slots, dtype=torch.int8) if is_epoch_lfu else None
    with torch.cuda.device_of(touch.slots):
        _touch_slots_kernel[grid](
            touch.slots,
            touch.tables,
            touch.epoch,
            touch.is_trained,
            touch.touched,
            touch.scores,
            touch.counters,
            overflows,
            num_ids,
            POLICY=touch.policy,
            BLOCK=_BLOCK,
        )
        # Kernels of their own, since what is added to a slot must be there before it is finished.
        passes = {Policy.EPOCH_LFU: (False, True), Policy.CALLER: (False,)}
        for of_overflows in passes.get(Policy(touch.policy), ()):
            _finish_scores_kernel[grid](
                touch.slots,
                touch.tables,
                touch.epoch_number,
                touch.scores_in,
                touch.is_trained,
                touch.scores,
                overflows,
                num_ids,
                POLICY=touch.policy,
                OVERFLOWS=of_overflows,
                BLOCK=_BLOCK,
            )
