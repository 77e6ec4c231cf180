"""The Triton kernels of ``claim_slots``.

The first one finds the slots of the batch's rows, marks them, and counts the rows that are missing.
Then one program walks with the hand until it has found as many slots: what a missing row costs
there is little beside reading the row itself, over a slower link, afterwards. The third one gives
the slots that were found to the missing rows, and takes the marks off.

Byte floor: for each row of the batch 8 bytes of it read, a sector of 32 bytes of its slot's number
read twice, and of four arrays of slots written; for each missing row the sectors of its old row's
and its own slot's number written, and 20 bytes of its move. For each slot that the hand passes 17
bytes read and 1 written.
"""

import torch
import triton
import triton.language as tl

from torchembed.core.row_caches import CacheCounter, ClaimResults, SlotClaim, empty_claim
from torchembed.triton_kernels.launch_sizes import cdiv

_UNIQUE_ROWS = tl.constexpr(int(CacheCounter.UNIQUE_ROWS))
_UNIQUE_MISSES = tl.constexpr(int(CacheCounter.UNIQUE_MISSES))
_WRITTEN_ROWS = tl.constexpr(int(CacheCounter.WRITTEN_ROWS))
_READ_ROWS = tl.constexpr(int(CacheCounter.READ_ROWS))
_REFUSED_BATCHES = tl.constexpr(int(CacheCounter.REFUSED_BATCHES))
_BLOCK = 1024
# Slots that the hand passes in one go, and the warps that look at them: what a step waits for is
# the latency of memory.
_TILE = 4096
_WALK_WARPS = 16


@triton.jit
def _num_wanted(num_unique_ptr, is_trained_ptr):
    """The number of rows that want slots: none where the batch is not trained.

    Example: 5 rows of a batch that is not trained: 0.
    """
    wanted = tl.load(num_unique_ptr)
    if is_trained_ptr is not None:
        wanted = tl.where(tl.load(is_trained_ptr) != 0, wanted, 0)
    return wanted


@triton.jit
def _claim_slots_mark_kernel(
    unique_rows_ptr,
    num_unique_ptr,
    is_trained_ptr,
    slot_of_row_ptr,
    row_of_slot_ptr,
    num_missing_ptr,
    BLOCK: tl.constexpr,
):
    """``num_missing[i]``: rows of the i-th block that are not cached. In the slots of the others
    the row r becomes ``-2 - r``, so that the hand leaves them.

    Example: rows 3 5 9, of which 5 is in slot 1: ``num_missing = [2]``, ``row_of_slot[1] = -7``.
    """
    program = tl.program_id(0)
    position = program * BLOCK + tl.arange(0, BLOCK)
    is_wanted = position < _num_wanted(num_unique_ptr, is_trained_ptr)
    row = tl.load(unique_rows_ptr + position, mask=is_wanted, other=0).to(tl.int64)
    slot = tl.load(slot_of_row_ptr + row, mask=is_wanted, other=0)
    tl.store(row_of_slot_ptr + slot, -2 - row, mask=is_wanted & (slot >= 0))
    tl.store(num_missing_ptr + program, tl.sum((slot < 0).to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["num_slots", "num_blocks"])
def _claim_slots_walk_kernel(
    num_unique_ptr,
    is_trained_ptr,
    released_ptr,
    row_of_slot_ptr,
    last_use_ptr,
    is_recent_ptr,
    hand_ptr,
    counters_ptr,
    num_missing_ptr,
    first_ptr,
    second_ptr,
    num_first_ptr,
    count_ptr,
    num_refused_ptr,
    num_slots,
    num_blocks,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """The slots that the hand finds for the missing rows, whose number is the sum of
    ``num_missing``: ``first`` those of its first round, ``second`` those that were recent. Where
    both are enough, the slots that it passed are not recent any more, ``count`` is their number and
    ``num_first`` how many are from ``first``; else ``num_refused`` is how many are too few.

    Example: slots 0 to 3 hold rows, all released, of which 1 and 2 are recent, the hand is at 1 and
    3 rows are missing: ``first = [3, 0]``, ``second = [1, 2]``, ``num_first = 2``, and no slot is
    recent.
    """
    num_missing = 0
    for first_block in range(0, num_blocks, BLOCK):
        block = first_block + tl.arange(0, BLOCK)
        missing = tl.load(num_missing_ptr + block, mask=block < num_blocks, other=0)
        num_missing += tl.sum(missing, axis=0)
    hand, released = tl.load(hand_ptr), tl.load(released_ptr)
    # int64, since the hand and the steps together may exceed int32.
    start = hand - hand
    num_passed = hand - hand
    num_found = 0
    num_recent = 0
    while (start < num_slots) & (num_found < num_missing):
        step = start + tl.arange(0, TILE)
        inside = step < num_slots
        slot = hand + step
        slot = tl.where(slot >= num_slots, slot - num_slots, slot)
        row = tl.load(row_of_slot_ptr + slot, mask=inside, other=-2)
        last_use = tl.load(last_use_ptr + slot, mask=inside, other=0)
        is_recent = tl.load(is_recent_ptr + slot, mask=inside, other=0) != 0
        is_evictable = (row == -1) | ((row >= 0) & (last_use <= released))
        in_first = is_evictable & (is_recent == 0)
        in_second = is_evictable & is_recent
        place = num_found + tl.cumsum(in_first.to(tl.int32), axis=0) - 1
        is_taken = in_first & (place < num_missing)
        tl.store(first_ptr + place, slot.to(tl.int32), mask=is_taken)
        num_passed = tl.max(tl.where(is_taken, step + 1, 0), axis=0)
        num_found += tl.sum(in_first.to(tl.int32), axis=0)
        place = num_recent + tl.cumsum(in_second.to(tl.int32), axis=0) - 1
        tl.store(second_ptr + place, slot.to(tl.int32), mask=in_second & (place < num_missing))
        num_recent += tl.sum(in_second.to(tl.int32), axis=0)
        start += TILE
    num_first = tl.minimum(num_found, num_missing)
    too_few = tl.maximum(num_missing - num_found - num_recent, 0)
    num_passed = tl.where(num_found < num_missing, num_slots, num_passed)
    num_passed = tl.where(too_few > 0, 0, num_passed)
    start = hand - hand
    while start < num_passed:
        step = start + tl.arange(0, TILE)
        slot = hand + step
        slot = tl.where(slot >= num_slots, slot - num_slots, slot)
        tl.store(is_recent_ptr + slot, tl.zeros([TILE], tl.int1), mask=step < num_passed)
        start += TILE

    num_read = tl.where(too_few > 0, 0, num_missing)
    tl.store(num_first_ptr, num_first)
    tl.store(count_ptr, num_read.to(tl.int64))
    tl.store(num_refused_ptr, too_few.to(tl.int64))
    wanted = _num_wanted(num_unique_ptr, is_trained_ptr)
    _count(counters_ptr + _UNIQUE_ROWS, wanted)
    _count(counters_ptr + _UNIQUE_MISSES, num_missing)
    _count(counters_ptr + _READ_ROWS, num_read)
    _count(counters_ptr + _REFUSED_BATCHES, (too_few > 0).to(tl.int32))


@triton.jit
def _count(counter_ptr, number):
    """Add ``number`` to a counter that no other program changes.

    Example: 2 to a counter of 5: 7.
    """
    tl.store(counter_ptr, tl.load(counter_ptr) + number)


@triton.jit(do_not_specialize=["num_slots", "num_moves"])
def _claim_slots_take_kernel(
    unique_rows_ptr,
    num_unique_ptr,
    is_trained_ptr,
    epoch_ptr,
    slot_of_row_ptr,
    row_of_slot_ptr,
    last_use_ptr,
    is_recent_ptr,
    is_dirty_ptr,
    hand_ptr,
    counters_ptr,
    num_missing_ptr,
    first_ptr,
    second_ptr,
    num_first_ptr,
    count_ptr,
    num_refused_ptr,
    moved_slots_ptr,
    written_rows_ptr,
    read_rows_ptr,
    num_slots,
    num_moves,
    BLOCK: tl.constexpr,
):
    """Give the slots that the hand found to the missing rows in order, note the moves, and that the
    batch uses its slots; take the marks off. A batch that was refused only loses its marks.

    Example: rows 3 5, of which 5 is in slot 1, ``first = [0]``, where row 7 is and is dirty: one
    move of slot 0, written row 7, read row 3. Slots 0 and 1 are recent, dirty and of this epoch.
    """
    program = tl.program_id(0)
    num_before = 0
    for first_block in range(0, program, BLOCK):
        block = first_block + tl.arange(0, BLOCK)
        missing = tl.load(num_missing_ptr + block, mask=block < program, other=0)
        num_before += tl.sum(missing, axis=0)

    position = program * BLOCK + tl.arange(0, BLOCK)
    is_wanted = position < _num_wanted(num_unique_ptr, is_trained_ptr)
    is_used = is_wanted & (tl.load(num_refused_ptr) == 0)
    row = tl.load(unique_rows_ptr + position, mask=is_wanted, other=0).to(tl.int64)
    held_slot = tl.load(slot_of_row_ptr + row, mask=is_wanted, other=0)
    is_missing = held_slot < 0
    is_taken = is_used & is_missing
    place = num_before + tl.cumsum(is_missing.to(tl.int32), axis=0) - 1
    num_first, count = tl.load(num_first_ptr), tl.load(count_ptr)
    of_first = place < num_first
    first = tl.load(first_ptr + place, mask=is_taken & of_first, other=0)
    second = tl.load(second_ptr + place - num_first, mask=is_taken & (of_first == 0), other=0)
    slot = tl.where(is_missing, tl.where(of_first, first, second), held_slot).to(tl.int64)

    old_row = tl.load(row_of_slot_ptr + slot, mask=is_taken, other=-1)
    was_dirty = tl.load(is_dirty_ptr + slot, mask=is_taken, other=0) != 0
    is_written = was_dirty & (old_row >= 0)
    num_written = tl.sum(is_written.to(tl.int64), axis=0)
    if num_written > 0:
        tl.atomic_add(counters_ptr + _WRITTEN_ROWS, num_written, sem="relaxed")
    tl.store(moved_slots_ptr + place, slot.to(tl.int32), mask=is_taken)
    tl.store(written_rows_ptr + place, tl.where(is_written, old_row, -1), mask=is_taken)
    tl.store(read_rows_ptr + place, row, mask=is_taken)
    next_slot = tl.where(slot + 1 == num_slots, 0, slot + 1)
    tl.store(hand_ptr + tl.zeros_like(slot), next_slot, mask=is_taken & (place == count - 1))

    # No old row is one of the batch's, so these do not meet.
    no_slot = tl.full([BLOCK], -1, tl.int32)
    tl.store(slot_of_row_ptr + old_row, no_slot, mask=is_taken & (old_row >= 0))
    tl.store(slot_of_row_ptr + row, slot.to(tl.int32), mask=is_taken)
    tl.store(row_of_slot_ptr + slot, row, mask=is_taken | (is_wanted & (held_slot >= 0)))
    yes = tl.full([BLOCK], 1, tl.int1)
    tl.store(last_use_ptr + slot, tl.zeros_like(slot) + tl.load(epoch_ptr), mask=is_used)
    tl.store(is_recent_ptr + slot, yes, mask=is_used)
    tl.store(is_dirty_ptr + slot, yes, mask=is_used)

    # Moves write the entries before these, so every entry is written once.
    is_behind = (position >= count) & (position < num_moves)
    tl.store(moved_slots_ptr + position, no_slot, mask=is_behind)
    no_row = tl.full([BLOCK], -1, tl.int64)
    tl.store(written_rows_ptr + position, no_row, mask=is_behind)
    tl.store(read_rows_ptr + position, no_row, mask=is_behind)


def launch_claim_slots(claim: SlotClaim) -> ClaimResults:
    """``torchembed::claim_slots``; see :func:`torchembed.ops.row_cache.claim_slots`."""
    rows, cache = claim.unique_rows, claim.cache
    num_ids, num_slots = rows.numel(), cache.row_of_slot.numel()
    results = empty_claim(rows, num_slots)
    moved_slots, written_rows, read_rows, count, num_refused = results
    if num_ids == 0:
        count.zero_()
        num_refused.zero_()
        return results
    num_moves, num_blocks = moved_slots.numel(), cdiv(num_ids, _BLOCK)
    num_missing = rows.new_empty(num_blocks, dtype=torch.int32)
    first, second = rows.new_empty(2, num_moves, dtype=torch.int32)
    num_first = rows.new_empty(1, dtype=torch.int32)
    batch = (rows, claim.num_unique, claim.is_trained)
    found = (num_missing, first, second, num_first, count, num_refused)
    with torch.cuda.device_of(rows):
        _claim_slots_mark_kernel[(num_blocks,)](
            *batch, cache.slot_of_row, cache.row_of_slot, num_missing, BLOCK=_BLOCK
        )
        _claim_slots_walk_kernel[(1,)](
            claim.num_unique,
            claim.is_trained,
            claim.released,
            cache.row_of_slot,
            cache.last_use,
            cache.is_recent,
            cache.hand,
            cache.counters,
            *found,
            num_slots,
            num_blocks,
            BLOCK=_BLOCK,
            TILE=_TILE,
            num_warps=_WALK_WARPS,
        )
        _claim_slots_take_kernel[(num_blocks,)](
            *batch,
            claim.epoch,
            *cache,
            *found,
            moved_slots,
            written_rows,
            read_rows,
            num_slots,
            num_moves,
            BLOCK=_BLOCK,
        )
    return results
