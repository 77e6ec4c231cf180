"""The Triton kernels of ``insert_keys``.

Positions are sorted by (table, hash), what is not to be inserted behind the rest. Equal keys are a
run then, and the runs of a block are neighbours. One program inserts the keys of a block one after
the other, since each must see what the one before it did, and blocks do not depend on each other:
many programs of one warp share them. Then what was inserted is moved to the front of the results.
Every size follows from the number of ids, and counts stay on the device.

Byte floor for each id: 21 bytes of its key, table, slot and flag read, 8 of its slot written, and
53 of an entry of the results. For each distinct new key the digests of two buckets (256 bytes),
and where both are full the epochs and scores of their slots (2048, or 4096 with scores); four
sectors of 32 bytes are written. The sort of 64-bit hashes moves more than all of these while few
keys are new.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.core.hash_tables import (
    BUCKET_SLOTS,
    Counter,
    InsertionResults,
    KeyInsertion,
    Policy,
    empty_results,
)
from torchembed.triton_kernels.hash_places import (
    block_of_hash,
    buckets_of_hash,
    digest_of_hash,
    hash_of_key,
)
from torchembed.triton_kernels.launch_sizes import cdiv

_SIZE = tl.constexpr(int(Counter.SIZE))
_INSERTED = tl.constexpr(int(Counter.INSERTED))
_REFUSED = tl.constexpr(int(Counter.REFUSED))
_EVICTED = tl.constexpr(int(Counter.EVICTED_FULL))
_EVICTED_AGE = tl.constexpr(int(Counter.EVICTED_AGE))
_NUM_COUNTERS = tl.constexpr(len(Counter))
_LRU = tl.constexpr(int(Policy.LRU))
_EPOCH_LFU = tl.constexpr(int(Policy.EPOCH_LFU))
_CALLER = tl.constexpr(int(Policy.CALLER))
_GREATEST = tl.constexpr(2**63 - 1)
_LEAST = tl.constexpr(-(2**63))
_BLOCK = 1024
# Programs of one warp that share the blocks of tables: as many as an H200 has room for. What one
# key waits for is the latency of memory, so many must be under way at once.
_MOST_PROGRAMS = 4224


@triton.jit(do_not_specialize=["num_ids", "num_tables"])
def _insert_keys_order_kernel(
    keys_ptr,
    tables_ptr,
    slots_ptr,
    wanted_ptr,
    is_trained_ptr,
    hashes_ptr,
    orders_ptr,
    num_ids,
    num_tables,
    BLOCK: tl.constexpr,
):
    """What positions are sorted by: ``orders``, the table of a key that is to be inserted and
    ``num_tables`` for others, then ``hashes``, less 2**63 so that signed numbers have the order.

    Example: two tables, ``tables = [1, -1, 0]``, ``slots = [-1, -1, 5]``: ``orders = [1, 2, 2]``.
    """
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < num_ids
    table = tl.load(tables_ptr + position, mask=inside, other=-1)
    slot = tl.load(slots_ptr + position, mask=inside, other=0)
    is_new = (table >= 0) & (slot < 0)
    if wanted_ptr is not None:
        is_new &= tl.load(wanted_ptr + position, mask=inside, other=0) != 0
    if is_trained_ptr is not None:
        is_new &= tl.load(is_trained_ptr) != 0
    key = tl.load(keys_ptr + position, mask=inside, other=0)
    hashed = hash_of_key(key).to(tl.int64, bitcast=True) ^ _LEAST
    tl.store(hashes_ptr + position, hashed, mask=inside)
    order = tl.where(is_new, table, num_tables)
    tl.store(orders_ptr + position, order.to(orders_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sorted_key(position, inside, order_ptr, orders_ptr, keys_ptr, geometry_ptr, num_tables):
    """The key at each sorted ``position``, its table, its block, and a mask of those that are to be
    inserted."""
    place = tl.load(order_ptr + position, mask=inside, other=0)
    table = tl.load(orders_ptr + place, mask=inside, other=0).to(tl.int64)
    is_new = inside & (table < num_tables)
    key = tl.load(keys_ptr + place, mask=is_new, other=0)
    num_blocks = tl.load(geometry_ptr + table * 4 + 1, mask=is_new, other=0)
    return place, key, table, block_of_hash(hash_of_key(key), num_blocks), is_new


@triton.jit(do_not_specialize=["num_ids", "num_tables"])
def _insert_keys_starts_kernel(
    order_ptr,
    orders_ptr,
    keys_ptr,
    geometry_ptr,
    starts_ptr,
    num_ids,
    num_tables,
    BLOCK: tl.constexpr,
):
    """``starts[0, i]``: 1 where a run of equal keys starts at sorted position i, ``starts[1, i]``
    where the runs of a block do.

    Example: keys 7 7 5 of one block in sorted order give 1 0 1 and 1 0 0.
    """
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < num_ids
    _, key, table, block, is_new = _sorted_key(
        position, inside, order_ptr, orders_ptr, keys_ptr, geometry_ptr, num_tables
    )
    _, key_before, table_before, block_before, _ = _sorted_key(
        position - 1,
        inside & (position > 0),
        order_ptr,
        orders_ptr,
        keys_ptr,
        geometry_ptr,
        num_tables,
    )
    is_first = is_new & ((position == 0) | (table != table_before))
    starts_run = is_first | (is_new & (key != key_before))
    starts_block = is_first | (is_new & (block != block_before))
    tl.store(starts_ptr + position, starts_run.to(tl.int32), mask=inside)
    tl.store(starts_ptr + num_ids + position, starts_block.to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["num_ids", "num_tables"])
def _insert_keys_runs_kernel(
    order_ptr,
    orders_ptr,
    runs_ptr,
    scores_in_ptr,
    run_starts_ptr,
    block_starts_ptr,
    run_scores_ptr,
    num_blocks_ptr,
    num_ids,
    num_tables,
    BLOCK: tl.constexpr,
):
    """From the numbers from 1 on of the runs, ``runs[0]``, and of the blocks, ``runs[1]``, at each
    sorted position: where each run starts, with which run each block does, and their ends.
    ``run_scores``: the greatest score that the caller gave for a key.

    Example: two positions of one run and one of the next, all of one block: ``runs = [[1, 1, 2],
    [1, 1, 1]]``, ``run_starts = [0, 2, 3]``, ``block_starts = [0, 2]``, ``num_blocks = 1``.
    """
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < num_ids
    place = tl.load(order_ptr + position, mask=inside, other=0)
    is_new = inside & (tl.load(orders_ptr + place, mask=inside, other=0).to(tl.int64) < num_tables)
    run = tl.load(runs_ptr + position, mask=is_new, other=0)
    block = tl.load(runs_ptr + num_ids + position, mask=is_new, other=0)
    has_before = is_new & (position > 0)
    run_before = tl.load(runs_ptr + position - 1, mask=has_before, other=0)
    block_before = tl.load(runs_ptr + num_ids + position - 1, mask=has_before, other=0)
    tl.store(run_starts_ptr + run - 1, position.to(tl.int32), mask=is_new & (run != run_before))
    tl.store(block_starts_ptr + block - 1, run - 1, mask=is_new & (block != block_before))

    has_next = is_new & (position + 1 < num_ids)
    next_place = tl.load(order_ptr + position + 1, mask=has_next, other=0)
    next_order = tl.load(orders_ptr + next_place, mask=has_next, other=0).to(tl.int64)
    is_last = is_new & ((position + 1 == num_ids) | (next_order >= num_tables))
    tl.store(run_starts_ptr + run, (position + 1).to(tl.int32), mask=is_last)
    tl.store(block_starts_ptr + block, run, mask=is_last)
    tl.store(num_blocks_ptr + tl.zeros_like(position), block, mask=is_last)
    if scores_in_ptr is not None:
        score = tl.load(scores_in_ptr + place, mask=is_new, other=0)
        tl.atomic_max(run_scores_ptr + run - 1, score, mask=is_new, sem="relaxed")


@triton.jit
def _slot_of_new_key(
    first,
    second,
    num_slots,
    score,
    released,
    digests_ptr,
    touched_ptr,
    scores_ptr,
    BUCKET: tl.constexpr,
):
    """The slot that a new key of ``score`` takes, -1 for none, and 1 where another key is evicted.

    The first free slot of the emptier bucket, of the ``first`` where they are equally full; else,
    among rows touched in epoch ``released`` or before, that of the least (score, epoch of the last
    use, bucket, place), unless its score exceeds ``score``.
    """
    index = tl.arange(0, 2 * BUCKET)
    in_second = index >= BUCKET
    place = index % BUCKET
    slot = tl.where(in_second, second, first) + place
    inside = (place < num_slots) & ((in_second == 0) | (second != first))
    is_free = inside & (tl.load(digests_ptr + slot, mask=inside, other=1) == 0)
    num_free_second = tl.sum((is_free & in_second).to(tl.int32), axis=0)
    num_free_first = tl.sum(is_free.to(tl.int32), axis=0) - num_free_second
    from_second = num_free_second > num_free_first
    chosen = tl.min(tl.where(is_free & (in_second == from_second), index, 2 * BUCKET), axis=0)
    evicts = (num_free_first == 0) & (num_free_second == 0)
    if evicts:
        touched = tl.load(touched_ptr + slot, mask=inside, other=_GREATEST)
        # Without scores the epoch is the score.
        scores = touched
        if scores_ptr is not None:
            scores = tl.load(scores_ptr + slot, mask=inside, other=_GREATEST)
        is_candidate = inside & (touched <= released)
        least = tl.min(tl.where(is_candidate, scores, _GREATEST), axis=0)
        is_candidate &= scores == least
        longest = tl.min(tl.where(is_candidate, touched, _GREATEST), axis=0)
        is_candidate &= (touched == longest) & (least <= score)
        chosen = tl.min(tl.where(is_candidate, index, 2 * BUCKET), axis=0)
    taken = tl.where(chosen >= BUCKET, second, first) + chosen % BUCKET
    return tl.where(chosen < 2 * BUCKET, taken, -1), evicts


@triton.jit
def _insert_keys_kernel(
    order_ptr,
    orders_ptr,
    keys_ptr,
    run_starts_ptr,
    block_starts_ptr,
    run_scores_ptr,
    num_blocks_ptr,
    epoch_ptr,
    epoch_number_ptr,
    released_ptr,
    digests_ptr,
    slot_keys_ptr,
    touched_ptr,
    scores_ptr,
    geometry_ptr,
    counters_ptr,
    is_inserted_ptr,
    run_slots_ptr,
    run_evicted_ptr,
    evicted_keys_ptr,
    evicted_scores_ptr,
    evicted_touched_ptr,
    POLICY: tl.constexpr,
    BUCKET: tl.constexpr,
):
    """Insert the keys of each block, one after the other, into its buckets; note for each run the
    slot of its key and what was evicted from it.

    Example: a table of one bucket of two slots, both free, and keys 7 and 5 in order: 7 takes slot
    0, 5 takes slot 1; SIZE and INSERTED grow by 2.
    """
    epoch, released = tl.load(epoch_ptr), tl.load(released_ptr)
    num_block_runs = tl.load(num_blocks_ptr)
    block_run = tl.program_id(0)
    while block_run < num_block_runs:
        run = tl.load(block_starts_ptr + block_run)
        end = tl.load(block_starts_ptr + block_run + 1)
        place = tl.load(order_ptr + tl.load(run_starts_ptr + run))
        table = tl.load(orders_ptr + place).to(tl.int64)
        first_slot = tl.load(geometry_ptr + table * 4)
        num_blocks = tl.load(geometry_ptr + table * 4 + 1)
        num_buckets = tl.load(geometry_ptr + table * 4 + 2)
        num_slots = tl.load(geometry_ptr + table * 4 + 3)
        num_inserted = epoch - epoch
        num_refused = epoch - epoch
        num_evicted = epoch - epoch
        age = epoch - epoch
        while run < end:
            start = tl.load(run_starts_ptr + run)
            key = tl.load(keys_ptr + tl.load(order_ptr + start))
            hashed = hash_of_key(key)
            first, second = buckets_of_hash(hashed, first_slot, num_blocks, num_buckets, num_slots)
            if POLICY == _LRU:
                score = epoch
            elif POLICY == _CALLER:
                score = tl.load(run_scores_ptr + run)
            else:
                score = (tl.load(run_starts_ptr + run + 1) - start).to(tl.int64)
                if POLICY == _EPOCH_LFU:
                    score += tl.load(epoch_number_ptr) << 32
            slot, evicts = _slot_of_new_key(
                first,
                second,
                num_slots,
                score,
                released,
                digests_ptr,
                touched_ptr,
                scores_ptr,
                BUCKET,
            )
            takes = slot >= 0
            if takes:
                if evicts:
                    last_use = tl.load(touched_ptr + slot)
                    old_score = last_use
                    if scores_ptr is not None:
                        old_score = tl.load(scores_ptr + slot)
                    tl.store(evicted_keys_ptr + run, tl.load(slot_keys_ptr + slot))
                    tl.store(evicted_scores_ptr + run, old_score)
                    tl.store(evicted_touched_ptr + run, last_use)
                    num_evicted += 1
                    age += epoch - last_use
                # All threads have read the old contents before one of them writes new ones.
                tl.debug_barrier()
                tl.store(digests_ptr + slot, digest_of_hash(hashed).to(tl.uint8))
                tl.store(slot_keys_ptr + slot, key)
                tl.store(touched_ptr + slot, epoch)
                if scores_ptr is not None:
                    tl.store(scores_ptr + slot, score)
                num_inserted += 1
            else:
                num_refused += 1
            tl.store(run_slots_ptr + run, slot)
            tl.store(is_inserted_ptr + run, takes.to(tl.int32))
            tl.store(run_evicted_ptr + run, (takes & evicts).to(tl.int8))
            # The next key sees what one thread wrote.
            tl.debug_barrier()
            run += 1
        counts_ptr = counters_ptr + table * _NUM_COUNTERS
        tl.atomic_add(counts_ptr + _SIZE, num_inserted - num_evicted, sem="relaxed")
        tl.atomic_add(counts_ptr + _INSERTED, num_inserted, sem="relaxed")
        tl.atomic_add(counts_ptr + _REFUSED, num_refused, sem="relaxed")
        tl.atomic_add(counts_ptr + _EVICTED, num_evicted, sem="relaxed")
        tl.atomic_add(counts_ptr + _EVICTED_AGE, age, sem="relaxed")
        block_run += tl.num_programs(0)


@triton.jit(do_not_specialize=["num_ids", "num_tables"])
def _insert_keys_results_kernel(
    order_ptr,
    orders_ptr,
    keys_ptr,
    slots_ptr,
    runs_ptr,
    run_starts_ptr,
    places_ptr,
    is_inserted_ptr,
    run_slots_ptr,
    run_evicted_ptr,
    run_evicted_keys_ptr,
    run_evicted_scores_ptr,
    run_evicted_touched_ptr,
    new_slots_of_ids_ptr,
    new_keys_ptr,
    new_tables_ptr,
    new_slots_ptr,
    num_new_ptr,
    is_evicted_ptr,
    evicted_keys_ptr,
    evicted_scores_ptr,
    evicted_touched_ptr,
    num_ids,
    num_tables,
    BLOCK: tl.constexpr,
):
    """Give each position its key's slot, and move the runs whose key was inserted to the front:
    run u to ``places[u] - 1``; entries behind them get no key.

    Example: runs of slots 3 -1 5: ``is_inserted = [1, 0, 1]``, ``places = [1, 1, 2]``: ``new_slots
    = [3, 5, -1]``, ``num_new = 2``.
    """
    # The same number is a sorted position, a run and an entry of the results, as in the lengths.
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = number < num_ids
    position = tl.load(order_ptr + number, mask=inside, other=0)
    table = tl.load(orders_ptr + position, mask=inside, other=0).to(tl.int64)
    is_new = inside & (table < num_tables)
    run_of_id = tl.load(runs_ptr + number, mask=is_new, other=1) - 1
    own = tl.load(run_slots_ptr + run_of_id, mask=is_new, other=-1)
    slot = tl.where(is_new, own, tl.load(slots_ptr + position, mask=inside, other=-1))
    tl.store(new_slots_of_ids_ptr + position, slot, mask=inside)

    taken = inside & (tl.load(is_inserted_ptr + number, mask=inside, other=0) != 0)
    entry = tl.load(places_ptr + number, mask=taken, other=1) - 1
    start = tl.load(run_starts_ptr + number, mask=taken, other=0)
    first = tl.load(order_ptr + start, mask=taken, other=0)
    key = tl.load(keys_ptr + first, mask=taken, other=0)
    of_table = tl.load(orders_ptr + first, mask=taken, other=0).to(tl.int32)
    evicts = taken & (tl.load(run_evicted_ptr + number, mask=taken, other=0) != 0)
    tl.store(new_keys_ptr + entry, key, mask=taken)
    tl.store(new_tables_ptr + entry, of_table, mask=taken)
    tl.store(new_slots_ptr + entry, tl.load(run_slots_ptr + number, mask=taken), mask=taken)
    tl.store(is_evicted_ptr + entry, evicts, mask=taken)
    old_key = tl.load(run_evicted_keys_ptr + number, mask=evicts, other=0)
    old_score = tl.load(run_evicted_scores_ptr + number, mask=evicts, other=0)
    last_use = tl.load(run_evicted_touched_ptr + number, mask=evicts, other=0)
    tl.store(evicted_keys_ptr + entry, old_key, mask=taken)
    tl.store(evicted_scores_ptr + entry, old_score, mask=taken)
    tl.store(evicted_touched_ptr + entry, last_use, mask=taken)

    num_new = tl.load(places_ptr + num_ids - 1)
    is_spare = inside & (number >= num_new)
    zero = tl.zeros([BLOCK], tl.int64)
    tl.store(new_keys_ptr + number, zero, mask=is_spare)
    tl.store(new_tables_ptr + number, (zero - 1).to(tl.int32), mask=is_spare)
    tl.store(new_slots_ptr + number, zero - 1, mask=is_spare)
    tl.store(is_evicted_ptr + number, zero != 0, mask=is_spare)
    tl.store(evicted_keys_ptr + number, zero, mask=is_spare)
    tl.store(evicted_scores_ptr + number, zero, mask=is_spare)
    tl.store(evicted_touched_ptr + number, zero, mask=is_spare)
    if tl.program_id(0) == 0:
        tl.store(num_new_ptr, num_new.to(tl.int64))


def _order_dtype(num_tables: int) -> torch.dtype:
    """The narrowest integer that holds ``num_tables``: the fewest bytes are sorted."""
    for dtype in (torch.int8, torch.int16):
        if num_tables <= torch.iinfo(dtype).max:
            return dtype
    return torch.int32


def launch_insert_keys(insertion: KeyInsertion) -> InsertionResults:
    """``torchembed::insert_keys``; see :func:`torchembed.ops.hash_table.insert_keys`."""
    keys = insertion.keys
    num_ids, num_tables = keys.numel(), insertion.geometry.shape[0]

    def like_keys(dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty_like(keys, dtype=dtype)

    results = empty_results(keys)
    if num_ids == 0:
        return results
    grid = (cdiv(num_ids, _BLOCK),)
    sizes = (num_ids, num_tables)
    with torch.cuda.device_of(keys):
        hashes, orders = like_keys(), like_keys(_order_dtype(num_tables))
        _insert_keys_order_kernel[grid](
            keys,
            insertion.tables,
            insertion.slots,
            insertion.wanted,
            insertion.is_trained,
            hashes,
            orders,
            *sizes,
            BLOCK=_BLOCK,
        )
        by_hash = torch.sort(hashes).indices
        order = by_hash[torch.sort(orders[by_hash], stable=True).indices]

        starts = keys.new_empty(2, num_ids, dtype=torch.int32)
        _insert_keys_starts_kernel[grid](
            order, orders, keys, insertion.geometry, starts, *sizes, BLOCK=_BLOCK
        )
        runs = torch.cumsum(starts, 1, dtype=torch.int32)
        run_starts, block_starts = keys.new_empty(2, num_ids + 1, dtype=torch.int32)
        num_blocks = keys.new_zeros(1, dtype=torch.int32)
        run_scores = None if insertion.scores_in is None else torch.full_like(keys, _LEAST.value)
        _insert_keys_runs_kernel[grid](
            order,
            orders,
            runs,
            insertion.scores_in,
            run_starts,
            block_starts,
            run_scores,
            num_blocks,
            *sizes,
            BLOCK=_BLOCK,
        )
        is_inserted = torch.zeros_like(keys, dtype=torch.int32)
        run_results = (like_keys(), like_keys(torch.int8), *(like_keys() for _ in range(3)))
        _insert_keys_kernel[(min(num_ids, _MOST_PROGRAMS),)](
            order,
            orders,
            keys,
            run_starts,
            block_starts,
            run_scores,
            num_blocks,
            insertion.epoch,
            insertion.epoch_number,
            insertion.released,
            insertion.digests,
            insertion.slot_keys,
            insertion.touched,
            insertion.scores,
            insertion.geometry,
            insertion.counters,
            is_inserted,
            *run_results,
            POLICY=insertion.policy,
            BUCKET=BUCKET_SLOTS,
            num_warps=1,
        )
        _insert_keys_results_kernel[grid](
            order,
            orders,
            keys,
            insertion.slots,
            runs,
            run_starts,
            torch.cumsum(is_inserted, 0, dtype=torch.int32),
            is_inserted,
            *run_results,
            *results,
            *sizes,
            BLOCK=_BLOCK,
        )
    return results
