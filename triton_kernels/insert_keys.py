"""The Triton kernels of ``insert_keys``.

Keys are sorted into runs of equal ones first, those of a block side by side
(``insert_keys_runs.py``). One program inserts the keys of a block one after the other, since each
must see what the one before it did, and blocks do not depend on each other: many programs of one
warp share them. Then what was inserted is moved to the front of the results
(``insert_keys_results.py``). Every size follows from the number of ids, and counts stay on the
device.

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
    buckets_of_hash,
    digest_of_hash,
    hash_of_key,
)
from torchembed.triton_kernels.insert_keys_results import (
    InsertedRuns,
    launch_insert_keys_results,
)
from torchembed.triton_kernels.insert_keys_runs import launch_insert_keys_runs

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
# Programs of one warp that share the blocks of tables: as many as an H200 has room for. What one
# key waits for is the latency of memory, so many must be under way at once.
_MOST_PROGRAMS = 4224


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


def launch_insert_keys(insertion: KeyInsertion) -> InsertionResults:
    """``torchembed::insert_keys``; see :func:`torchembed.ops.hash_table.insert_keys`."""
    keys = insertion.keys
    results = empty_results(keys)
    if keys.numel() == 0:
        return results

    def of_runs() -> Tensor:
        return torch.empty_like(keys, dtype=torch.int64)

    with torch.cuda.device_of(keys):
        runs = launch_insert_keys_runs(insertion)
        inserted = InsertedRuns(
            is_inserted=torch.zeros_like(keys, dtype=torch.int32),
            slots=of_runs(),
            is_evicted=torch.empty_like(keys, dtype=torch.int8),
            evicted_keys=of_runs(),
            evicted_scores=of_runs(),
            evicted_touched=of_runs(),
        )
        _insert_keys_kernel[(min(keys.numel(), _MOST_PROGRAMS),)](
            runs.order,
            runs.orders,
            keys,
            runs.run_starts,
            runs.block_starts,
            runs.run_scores,
            runs.num_blocks,
            insertion.epoch,
            insertion.epoch_number,
            insertion.released,
            insertion.digests,
            insertion.slot_keys,
            insertion.touched,
            insertion.scores,
            insertion.geometry,
            insertion.counters,
            *inserted,
            POLICY=insertion.policy,
            BUCKET=BUCKET_SLOTS,
            num_warps=1,
        )
        launch_insert_keys_results(insertion, runs, inserted, results)
    return results
