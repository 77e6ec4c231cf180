"""The Triton kernels of ``claim_slots``.

The first one marks the slots of the batch's rows as used, and counts the rows that are missing. In
the second one programs look at tiles of slots in the order of the hand, whichever program is free
at the next tile, until those that were looked at hold enough to evict; no program waits for
another one. The third one then knows from the counts of all tiles which slots the hand takes, gives
them to the missing rows, and forgets that those it passes are recent.

Byte floor: for each row of the batch 8 bytes of it read, and a sector of 32 bytes of its slot's
number; for each that is cached sectors of three arrays of slots read, and one written. For each
slot that the hand passes 17 bytes read twice, the second time from the second-level cache, and one
written; for each missing row two sectors of slots' numbers written, and 46 bytes of its slot and
its move. For each possible move, of which there may be as many as ids, 20 bytes written.
"""

# Kernels take plain numbers as tl.constexpr, which type checkers do not know.
# pyright: reportArgumentType=false

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
# Elements of ``walk``, int32, which kernels tell each other.
_START = tl.constexpr(0)  # the slot at which the hand stands
_NUM_TILES = tl.constexpr(1)  # tiles that programs have begun to look at, and one more for each
_NUM_FIRST = tl.constexpr(2)  # slots in them that the hand's first round may take
_NUM_SECOND = tl.constexpr(3)  # those that only its second one may
_NUM_MISSING = tl.constexpr(4)
_WALK_SIZE = 5
_BLOCK = 1024
# Slots of a tile, and programs that look at tiles: what is to be evicted is mostly found in the
# first tile of each, so that a step waits for the latency of memory once.
_TILE = 1024
_MOST_PROGRAMS = 528


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
def _sum_of_first(counts_ptr, num_counts, BLOCK: tl.constexpr):
    """The sum of the first ``num_counts``, int32.

    Example: 2 of 3 4 5: 7.
    """
    total = 0
    for first in range(0, num_counts, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        counts = tl.load(counts_ptr + entry, mask=entry < num_counts, other=0)
        total += tl.sum(counts, axis=0)
    return total


@triton.jit
def _count(counter_ptr, number):
    """Add ``number`` to a counter that no other program changes.

    Example: 2 to a counter of 5: 7.
    """
    tl.store(counter_ptr, tl.load(counter_ptr) + number)


@triton.jit(do_not_specialize=["num_moves"])
def _claim_slots_mark_kernel(
    unique_rows_ptr,
    num_unique_ptr,
    is_trained_ptr,
    epoch_ptr,
    slot_of_row_ptr,
    last_use_ptr,
    is_recent_ptr,
    is_dirty_ptr,
    hand_ptr,
    num_missing_ptr,
    walk_ptr,
    moved_slots_ptr,
    written_rows_ptr,
    read_rows_ptr,
    num_moves,
    BLOCK: tl.constexpr,
):
    """``num_missing[i]``: rows of the i-th block that are not cached. The slots of the others are
    of this epoch, recent and dirty. All moves are -1, and ``walk`` begins at the hand.

    Example: rows 3 5 9, of which 5 is in slot 1, in epoch 4: ``num_missing = [2]``,
    ``last_use[1] = 4``.
    """
    program = tl.program_id(0)
    position = program * BLOCK + tl.arange(0, BLOCK)
    is_wanted = position < _num_wanted(num_unique_ptr, is_trained_ptr)
    row = tl.load(unique_rows_ptr + position, mask=is_wanted, other=0).to(tl.int64)
    slot = tl.load(slot_of_row_ptr + row, mask=is_wanted, other=0)
    tl.store(num_missing_ptr + program, tl.sum((slot < 0).to(tl.int32), axis=0))
    is_held = is_wanted & (slot >= 0)
    tl.store(last_use_ptr + slot, tl.zeros_like(row) + tl.load(epoch_ptr), mask=is_held)
    # Most are recent and dirty already: memory writes part of a sector at the price of two.
    yes = tl.full([BLOCK], 1, tl.int1)
    was_recent = tl.load(is_recent_ptr + slot, mask=is_held, other=1) != 0
    tl.store(is_recent_ptr + slot, yes, mask=was_recent == 0)
    was_dirty = tl.load(is_dirty_ptr + slot, mask=is_held, other=1) != 0
    tl.store(is_dirty_ptr + slot, yes, mask=was_dirty == 0)

    is_move = position < num_moves
    no_row = tl.full([BLOCK], -1, tl.int64)
    tl.store(moved_slots_ptr + position, no_row.to(tl.int32), mask=is_move)
    tl.store(written_rows_ptr + position, no_row, mask=is_move)
    tl.store(read_rows_ptr + position, no_row, mask=is_move)
    if program == 0:
        tl.store(walk_ptr + _START, tl.load(hand_ptr).to(tl.int32))
        tl.store(walk_ptr + _NUM_TILES, 0)
        tl.store(walk_ptr + _NUM_FIRST, 0)
        tl.store(walk_ptr + _NUM_SECOND, 0)


@triton.jit
def _list_missing(
    unique_rows_ptr,
    slot_of_row_ptr,
    num_missing_ptr,
    read_rows_ptr,
    num_wanted,
    num_moves,
    BLOCK: tl.constexpr,
):
    """``read_rows[i]``: the i-th row that is missing, as far as there are moves. Each program lists
    those of as many blocks in a row.

    Example: rows 3 5 9, of which 5 is cached: ``read_rows = [3, 9, ...]``.
    """
    num_blocks = tl.cdiv(num_wanted, BLOCK)
    num_of_each = tl.cdiv(num_blocks, tl.num_programs(0))
    block = tl.program_id(0) * num_of_each
    end = tl.minimum(block + num_of_each, num_blocks)
    num_before = 0
    if block < end:
        num_before = _sum_of_first(num_missing_ptr, block, BLOCK)
    while block < end:
        position = block * BLOCK + tl.arange(0, BLOCK)
        is_wanted = position < num_wanted
        row = tl.load(unique_rows_ptr + position, mask=is_wanted, other=0).to(tl.int64)
        slot = tl.load(slot_of_row_ptr + row, mask=is_wanted, other=0)
        is_missing = (slot < 0).to(tl.int32)
        place = num_before + tl.cumsum(is_missing, axis=0) - 1
        tl.store(read_rows_ptr + place, row, mask=(slot < 0) & (place < num_moves))
        num_before += tl.sum(is_missing, axis=0)
        block += 1


@triton.jit
def _look_at_tile(
    row_of_slot_ptr,
    last_use_ptr,
    is_recent_ptr,
    tile,
    start,
    released,
    num_slots,
    TILE: tl.constexpr,
):
    """The slots of a tile, int64 ``[TILE]``, from the slot ``start`` on, and of each its row, last
    use, whether it is recent, and whether the hand's first round may take it, its second one, and
    whether it is a slot.

    Example: tile 0 of 4 from slot 2 of 3, holding rows 5 6 -1, all released, of which 6 in slot 1
    is recent: slots 2 0 1 and one that is none; the first round may take 2 and 0, the second 1.
    """
    step = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = step < num_slots
    slot = start + step
    slot = tl.where(slot >= num_slots, slot - num_slots, slot)
    row = tl.load(row_of_slot_ptr + slot, mask=inside, other=-1)
    last_use = tl.load(last_use_ptr + slot, mask=inside, other=0)
    is_recent = tl.load(is_recent_ptr + slot, mask=inside, other=0) != 0
    is_evictable = inside & ((row < 0) | (last_use <= released))
    in_first = is_evictable & (is_recent == 0)
    in_second = is_evictable & is_recent
    return slot, row, last_use, is_recent, in_first, in_second, inside


@triton.jit(do_not_specialize=["num_slots", "num_blocks", "num_tiles", "num_moves"])
def _claim_slots_search_kernel(
    unique_rows_ptr,
    num_unique_ptr,
    is_trained_ptr,
    released_ptr,
    slot_of_row_ptr,
    row_of_slot_ptr,
    last_use_ptr,
    is_recent_ptr,
    num_missing_ptr,
    walk_ptr,
    first_ptr,
    second_ptr,
    read_rows_ptr,
    num_slots,
    num_blocks,
    num_tiles,
    num_moves,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """List the missing rows in ``read_rows``, and count in tiles, from the hand on, how many slots
    its rounds may take: ``first[t]`` in tile t, and ``second[t]``, until the first round finds as
    many as are missing, or every tile was counted. ``walk`` gets the number of tiles, at least, the
    sums, and the number of missing rows.

    Example: slots 0 to 3 hold rows, all released, of which 1 and 2 are recent, the hand is at 1,
    one row is missing and a tile has 2 slots: ``first = [0, 2]``, ``second = [2, 0]``.
    """
    num_wanted = _num_wanted(num_unique_ptr, is_trained_ptr)
    _list_missing(
        unique_rows_ptr,
        slot_of_row_ptr,
        num_missing_ptr,
        read_rows_ptr,
        num_wanted,
        num_moves,
        BLOCK,
    )
    num_missing = _sum_of_first(num_missing_ptr, num_blocks, BLOCK)
    if tl.program_id(0) == 0:
        tl.store(walk_ptr + _NUM_MISSING, num_missing)
    start, released = tl.load(walk_ptr + _START), tl.load(released_ptr)
    is_searching = num_missing > 0
    while is_searching:
        tile = tl.atomic_add(walk_ptr + _NUM_TILES, 1, sem="relaxed")
        is_searching = tile < num_tiles
        if is_searching:
            _, _, _, _, in_first, in_second, _ = _look_at_tile(
                row_of_slot_ptr,
                last_use_ptr,
                is_recent_ptr,
                tile,
                start,
                released,
                num_slots,
                TILE,
            )
            num_first = tl.sum(in_first.to(tl.int32), axis=0)
            num_second = tl.sum(in_second.to(tl.int32), axis=0)
            tl.store(first_ptr + tile, num_first)
            tl.store(second_ptr + tile, num_second)
            tl.atomic_add(walk_ptr + _NUM_SECOND, num_second, sem="relaxed")
            # Tiles are begun in order, so that all before this one are counted in the end. Of those
            # that others look at now it does not know: it may go on where these have enough.
            num_found = tl.atomic_add(walk_ptr + _NUM_FIRST, num_first, sem="relaxed")
            is_searching = num_found + num_first < num_missing


@triton.jit(do_not_specialize=["num_slots", "num_tiles", "num_moves"])
def _claim_slots_take_kernel(
    num_unique_ptr,
    is_trained_ptr,
    epoch_ptr,
    released_ptr,
    slot_of_row_ptr,
    row_of_slot_ptr,
    last_use_ptr,
    is_recent_ptr,
    is_dirty_ptr,
    hand_ptr,
    counters_ptr,
    walk_ptr,
    first_ptr,
    second_ptr,
    moved_slots_ptr,
    written_rows_ptr,
    read_rows_ptr,
    count_ptr,
    num_refused_ptr,
    num_slots,
    num_tiles,
    num_moves,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Give the slots that the hand takes to the missing rows, ``read_rows``, and note the moves;
    the slots that it passes are not recent any more, and it goes on. A batch that is refused has no
    moves.

    Example: slots 0 to 3 hold rows 4 to 7, all released, of which 5 in slot 1 is dirty and those in
    1 and 2 are recent, the hand is at 1 and rows 0 1 2 are missing: slots 3 and 0 are of the first
    round, slot 1 of the second. Three moves: slot 3 reads row 0, slot 0 row 1, and slot 1 writes
    row 5 and reads row 2; the hand is at 2.
    """
    num_missing = tl.load(walk_ptr + _NUM_MISSING)
    num_of_first, num_of_second = tl.load(walk_ptr + _NUM_FIRST), tl.load(walk_ptr + _NUM_SECOND)
    too_few = tl.maximum(num_missing - num_of_first - num_of_second, 0)
    num_read = tl.where(too_few > 0, 0, num_missing)
    program = tl.program_id(0)
    if program == 0:
        tl.store(count_ptr, num_read.to(tl.int64))
        tl.store(num_refused_ptr, too_few.to(tl.int64))
        _count(counters_ptr + _UNIQUE_ROWS, _num_wanted(num_unique_ptr, is_trained_ptr))
        _count(counters_ptr + _UNIQUE_MISSES, num_missing)
        _count(counters_ptr + _READ_ROWS, num_read)
        _count(counters_ptr + _REFUSED_BATCHES, (too_few > 0).to(tl.int32))
    if too_few > 0:
        first_place = program * BLOCK
        while first_place < tl.minimum(num_missing, num_moves):
            place = first_place + tl.arange(0, BLOCK)
            no_row = tl.full([BLOCK], -1, tl.int64)
            tl.store(read_rows_ptr + place, no_row, mask=place < num_moves)
            first_place += tl.num_programs(0) * BLOCK

    # Each program takes as many tiles in a row.
    num_counted = tl.minimum(tl.load(walk_ptr + _NUM_TILES), num_tiles)
    num_of_each = tl.cdiv(num_counted, tl.num_programs(0))
    tile = program * num_of_each
    end = tl.where(too_few > 0, tile, tl.minimum(tile + num_of_each, num_counted))
    num_first = 0
    num_second = 0
    if tile < end:
        num_first = _sum_of_first(first_ptr, tile, BLOCK)
        num_second = num_of_first + _sum_of_first(second_ptr, tile, BLOCK)
    start, released, epoch = tl.load(walk_ptr + _START), tl.load(released_ptr), tl.load(epoch_ptr)
    # Behind the last slot of the first round the hand goes only for a second one.
    while (tile < end) & ((num_first < num_missing) | (num_of_first < num_missing)):
        slot, row, last_use, is_recent, in_first, in_second, inside = _look_at_tile(
            row_of_slot_ptr, last_use_ptr, is_recent_ptr, tile, start, released, num_slots, TILE
        )
        one_of_first, one_of_second = in_first.to(tl.int32), in_second.to(tl.int32)
        place_in_first = num_first + tl.cumsum(one_of_first, axis=0) - one_of_first
        place_in_second = num_second + tl.cumsum(one_of_second, axis=0) - one_of_second
        is_passed = inside & (place_in_first < num_missing)
        place = tl.where(in_first, place_in_first, place_in_second)
        is_taken = (in_first | in_second) & (place < num_missing)

        read_row = tl.load(read_rows_ptr + place, mask=is_taken, other=0)
        was_dirty = tl.load(is_dirty_ptr + slot, mask=is_taken, other=0) != 0
        is_held = is_taken & (row >= 0)
        is_written = is_held & was_dirty
        tl.store(moved_slots_ptr + place, slot.to(tl.int32), mask=is_taken)
        tl.store(written_rows_ptr + place, row, mask=is_written)
        num_written = tl.sum(is_written.to(tl.int64), axis=0)
        if num_written > 0:
            tl.atomic_add(counters_ptr + _WRITTEN_ROWS, num_written, sem="relaxed")
        next_slot = tl.where(slot + 1 == num_slots, 0, slot + 1)
        tl.store(hand_ptr + tl.zeros_like(slot), next_slot, mask=is_taken & (place == num_read - 1))

        # No old row is one of the batch's, so these do not meet.
        no_slot = tl.full([TILE], -1, tl.int32)
        tl.store(slot_of_row_ptr + row, no_slot, mask=is_held)
        tl.store(slot_of_row_ptr + read_row, slot.to(tl.int32), mask=is_taken)
        tl.store(row_of_slot_ptr + slot, read_row, mask=is_taken)
        tl.store(last_use_ptr + slot, tl.zeros_like(slot) + epoch, mask=is_taken)
        tl.store(is_dirty_ptr + slot, tl.full([TILE], 1, tl.int1), mask=is_taken & (was_dirty == 0))
        is_of_batch = is_taken | (is_recent & (last_use == epoch))
        tl.store(is_recent_ptr + slot, is_of_batch, mask=is_passed | is_taken)
        num_first += tl.sum(one_of_first, axis=0)
        num_second += tl.sum(one_of_second, axis=0)
        tile += 1


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
    num_moves = moved_slots.numel()
    num_blocks, num_tiles = cdiv(num_ids, _BLOCK), cdiv(num_slots, _TILE)
    num_missing = rows.new_empty(num_blocks, dtype=torch.int32)
    first, second = rows.new_empty(2, num_tiles, dtype=torch.int32)
    walk = rows.new_empty(_WALK_SIZE, dtype=torch.int32)
    slots = cache.row_of_slot, cache.last_use, cache.is_recent
    with torch.cuda.device_of(rows):
        _claim_slots_mark_kernel[(num_blocks,)](
            rows,
            claim.num_unique,
            claim.is_trained,
            claim.epoch,
            cache.slot_of_row,
            cache.last_use,
            cache.is_recent,
            cache.is_dirty,
            cache.hand,
            num_missing,
            walk,
            moved_slots,
            written_rows,
            read_rows,
            num_moves,
            BLOCK=_BLOCK,
        )
        _claim_slots_search_kernel[(min(max(num_blocks, num_tiles), _MOST_PROGRAMS),)](
            rows,
            claim.num_unique,
            claim.is_trained,
            claim.released,
            cache.slot_of_row,
            *slots,
            num_missing,
            walk,
            first,
            second,
            read_rows,
            num_slots,
            num_blocks,
            num_tiles,
            num_moves,
            BLOCK=_BLOCK,
            TILE=_TILE,
        )
        _claim_slots_take_kernel[(min(max(num_blocks, num_tiles), _MOST_PROGRAMS),)](
            claim.num_unique,
            claim.is_trained,
            claim.epoch,
            claim.released,
            *cache,
            walk,
            first,
            second,
            moved_slots,
            written_rows,
            read_rows,
            count,
            num_refused,
            num_slots,
            num_tiles,
            num_moves,
            BLOCK=_BLOCK,
            TILE=_TILE,
        )
    return results
