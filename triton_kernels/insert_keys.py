"""The Triton kernels of ``insert_keys``.

The keys that are to be inserted are in bins by their hashes (``key_bins.py``). One program inserts
the keys of a block one after the other in the order of their hashes, since each must see what the
one before it did. Blocks do not depend on each other: many programs of one warp share them. In its
bins a program looks for the least hash that is left, and finds its equals on the way. Then what was
inserted is moved to the front of the results (``insert_keys_results.py``). Every size follows from
the number of ids, and counts stay on the device.

Byte floor: that of the bins, and 53 bytes of an entry of the results written for each id. For each
distinct new key the digests of two buckets (256 bytes), and where both are full the epochs and
scores of their slots (2048, or 4096 with scores); four sectors of 32 bytes are written.
"""

from collections.abc import Callable

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
from torchembed.triton_kernels.insert_keys_results import (
    InsertedKeys,
    empty_inserted_keys,
    launch_insert_keys_results,
)
from torchembed.triton_kernels.key_bins import KeyBins, bin_of_hash, put_into_bins

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
_CHUNK = 64
"""Entries of a bin that a program looks at in one go."""
_LEAST_SLOTS = 2048
"""Slots that each block has at least in a table of several blocks."""
# Programs of one warp that share the blocks of tables: as many as an H200 has room for. What one
# key waits for is the latency of memory, so many must be under way at once.
_MOST_PROGRAMS = 4224

InsertBinned = Callable[[KeyInsertion, KeyBins, Tensor, InsertedKeys, int], None]
"""Inserts the keys of bins: changes the tables, and writes slots and what was inserted. The number
is one of blocks: there are no more that keys come into."""


@triton.jit
def _next_key(
    bin_keys_ptr,
    bin_positions_ptr,
    scores_in_ptr,
    start,
    end,
    num_blocks,
    block,
    last,
    is_first,
    CHUNK: tl.constexpr,
):
    """The key of the least hash of ``block`` above ``last``, or of all where ``is_first``, in a bin
    from ``start`` to ``end``; its hash less 2**63, so that signed numbers have the order; its
    entries, 0 where none is left; the greatest score that the caller gave for it; the entries of
    its block that are left behind it, and those of blocks before.

    Example: keys 7 5 7 of one block, 5 of the lesser hash: key 5 of 1 entry, then key 7 of 2.
    """
    found_key, found, score = last - last, last - last, last - last
    num_found = start - start
    num_left = start - start
    num_before = start - start
    while start < end:
        entry = start + tl.arange(0, CHUNK)
        inside = entry < end
        key = tl.load(bin_keys_ptr + entry, mask=inside, other=0)
        hashed = hash_of_key(key)
        ordered = hashed.to(tl.int64, bitcast=True) ^ _LEAST
        of_block = block_of_hash(hashed, num_blocks)
        is_left = inside & (of_block == block) & (is_first | (ordered > last))
        num_left += tl.sum(is_left.to(tl.int32), axis=0)
        num_before += tl.sum((inside & (of_block < block)).to(tl.int32), axis=0)
        least = tl.min(tl.where(is_left, ordered, _GREATEST), axis=0)
        is_least = is_left & (ordered == least)
        num_least = tl.sum(is_least.to(tl.int32), axis=0)
        if (num_least > 0) & ((num_found == 0) | (least <= found)):
            greatest = least - least
            if scores_in_ptr is not None:
                position = tl.load(bin_positions_ptr + entry, mask=is_least, other=0)
                given = tl.load(scores_in_ptr + position, mask=is_least, other=_LEAST)
                greatest = tl.max(given, axis=0)
            if (num_found > 0) & (least == found):
                num_found += num_least
                score = tl.maximum(score, greatest)
            else:
                found = least
                found_key = tl.max(tl.where(is_least, key, _LEAST), axis=0)
                num_found = num_least
                score = greatest
        start += CHUNK
    return found_key, found, num_found, score, num_left - num_found, num_before


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


@triton.jit(do_not_specialize=["num_tables"])
def _insert_keys_kernel(
    bin_keys_ptr,
    bin_positions_ptr,
    bin_ends_ptr,
    scores_in_ptr,
    epoch_ptr,
    epoch_number_ptr,
    released_ptr,
    digests_ptr,
    slot_keys_ptr,
    touched_ptr,
    scores_ptr,
    geometry_ptr,
    counters_ptr,
    slots_out_ptr,
    is_inserted_ptr,
    taken_keys_ptr,
    taken_tables_ptr,
    taken_slots_ptr,
    is_evicted_ptr,
    evicted_keys_ptr,
    evicted_scores_ptr,
    evicted_touched_ptr,
    num_tables,
    POLICY: tl.constexpr,
    BUCKET: tl.constexpr,
    BINS_LOG2: tl.constexpr,
    CHUNK: tl.constexpr,
    TABLES: tl.constexpr,
):
    """Insert the keys of each block, one after the other, into its buckets, and give all positions
    of a key its slot. What was inserted from a bin, and what was evicted for it, is noted in the
    order of the hashes: where the key's first entry would be if the bin's entries had that order.

    Example: a table of one bucket of two slots, both free, and keys 7 and 5 in order: 7 takes slot
    0, 5 takes slot 1; SIZE and INSERTED grow by 2.
    """
    epoch, released = tl.load(epoch_ptr), tl.load(released_ptr)
    tables = tl.arange(0, TABLES)
    is_table = tables < num_tables
    blocks = tl.load(geometry_ptr + tables * 4 + 1, mask=is_table, other=0)
    # A table without rows refuses keys in one block.
    blocks = tl.where(is_table, tl.maximum(blocks, 1), 0)
    block_ends = tl.cumsum(blocks, axis=0)
    num_all_blocks = tl.sum(blocks, axis=0)
    number = tl.program_id(0).to(tl.int64)
    while number < num_all_blocks:
        table = tl.sum((is_table & (block_ends <= number)).to(tl.int64), axis=0)
        block = number - tl.sum(tl.where(tables < table, blocks, 0), axis=0)
        first_slot = tl.load(geometry_ptr + table * 4)
        num_blocks = tl.load(geometry_ptr + table * 4 + 1)
        num_buckets = tl.load(geometry_ptr + table * 4 + 2)
        num_slots = tl.load(geometry_ptr + table * 4 + 3)
        # The bins that hold hashes from block / num_blocks on, to those before the next block's.
        divisor = tl.maximum(num_blocks, 1)
        first_bin = (table << BINS_LOG2) + (block << BINS_LOG2) // divisor
        last_bin = (table << BINS_LOG2) + (((block + 1) << BINS_LOG2) - 1) // divisor
        entry = tl.load(bin_ends_ptr + first_bin - 1, mask=first_bin > 0, other=0)
        end = tl.load(bin_ends_ptr + last_bin)
        num_inserted = epoch - epoch
        num_refused = epoch - epoch
        num_evicted = epoch - epoch
        age = epoch - epoch
        while entry < end:
            hashed = hash_of_key(tl.load(bin_keys_ptr + entry))
            bin_end = tl.load(bin_ends_ptr + bin_of_hash(hashed, table, BINS_LOG2))
            last = epoch - epoch
            num_left = bin_end - entry
            num_done = num_left - num_left
            while num_left > 0:
                key, last, num_entries, score, num_left, num_before = _next_key(
                    bin_keys_ptr,
                    bin_positions_ptr,
                    scores_in_ptr,
                    entry,
                    bin_end,
                    num_blocks,
                    block,
                    last,
                    num_done == 0,
                    CHUNK,
                )
                # Other blocks have entries in the first and the last bin.
                place = entry + num_before + num_done
                num_done += num_entries
                if num_entries > 0:
                    if POLICY == _LRU:
                        score = epoch
                    elif POLICY != _CALLER:
                        score = num_entries.to(tl.int64)
                        if POLICY == _EPOCH_LFU:
                            score += tl.load(epoch_number_ptr) << 32
                    hashed = hash_of_key(key)
                    first, second = buckets_of_hash(
                        hashed, first_slot, num_blocks, num_buckets, num_slots
                    )
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
                    if slot >= 0:
                        if evicts:
                            last_use = tl.load(touched_ptr + slot)
                            old_score = last_use
                            if scores_ptr is not None:
                                old_score = tl.load(scores_ptr + slot)
                            tl.store(evicted_keys_ptr + place, tl.load(slot_keys_ptr + slot))
                            tl.store(evicted_scores_ptr + place, old_score)
                            tl.store(evicted_touched_ptr + place, last_use)
                            num_evicted += 1
                            age += epoch - last_use
                        # All threads have read the old contents before one of them writes new ones.
                        tl.debug_barrier()
                        tl.store(digests_ptr + slot, digest_of_hash(hashed).to(tl.uint8))
                        tl.store(slot_keys_ptr + slot, key)
                        tl.store(touched_ptr + slot, epoch)
                        if scores_ptr is not None:
                            tl.store(scores_ptr + slot, score)
                        tl.store(is_inserted_ptr + place, 1)
                        tl.store(taken_keys_ptr + place, key)
                        tl.store(taken_tables_ptr + place, table.to(tl.int32))
                        tl.store(taken_slots_ptr + place, slot)
                        tl.store(is_evicted_ptr + place, evicts.to(tl.int8))
                        num_inserted += 1
                        chunk = entry
                        while chunk < bin_end:
                            index = chunk + tl.arange(0, CHUNK)
                            inside = index < bin_end
                            keys = tl.load(bin_keys_ptr + index, mask=inside, other=0)
                            is_key = inside & (keys == key)
                            position = tl.load(bin_positions_ptr + index, mask=is_key, other=0)
                            tl.store(slots_out_ptr + position, slot, mask=is_key)
                            chunk += CHUNK
                        # The next key sees what one thread wrote.
                        tl.debug_barrier()
                    else:
                        num_refused += 1
            entry = bin_end
        if (num_inserted > 0) | (num_refused > 0):
            counts_ptr = counters_ptr + table * _NUM_COUNTERS
            tl.atomic_add(counts_ptr + _SIZE, num_inserted - num_evicted, sem="relaxed")
            tl.atomic_add(counts_ptr + _INSERTED, num_inserted, sem="relaxed")
            tl.atomic_add(counts_ptr + _REFUSED, num_refused, sem="relaxed")
            tl.atomic_add(counts_ptr + _EVICTED, num_evicted, sem="relaxed")
            tl.atomic_add(counts_ptr + _EVICTED_AGE, age, sem="relaxed")
        number += tl.num_programs(0)


def insert_by(insert_binned: InsertBinned, insertion: KeyInsertion) -> InsertionResults:
    """``torchembed::insert_keys`` whose keys ``insert_binned`` inserts; see
    :func:`torchembed.ops.hash_table.insert_keys`."""
    keys = insertion.keys
    num_ids, num_tables = keys.numel(), insertion.geometry.shape[0]
    results = empty_results(keys)
    if num_ids == 0:
        return results
    slots = results[0]
    with torch.cuda.device_of(keys):
        bins = put_into_bins(insertion, slots)
        inserted = empty_inserted_keys(keys)
        num_blocks = num_tables + insertion.digests.numel() // _LEAST_SLOTS
        insert_binned(insertion, bins, slots, inserted, min(num_ids, max(num_blocks, 1)))
        launch_insert_keys_results(inserted, results)
    return results


def _insert_binned_keys(
    insertion: KeyInsertion, bins: KeyBins, slots: Tensor, inserted: InsertedKeys, num_blocks: int
) -> None:
    num_tables = insertion.geometry.shape[0]
    _insert_keys_kernel[(min(num_blocks, _MOST_PROGRAMS),)](
        bins.keys,
        bins.positions,
        bins.ends,
        insertion.scores_in,
        insertion.epoch,
        insertion.epoch_number,
        insertion.released,
        insertion.digests,
        insertion.slot_keys,
        insertion.touched,
        insertion.scores,
        insertion.geometry,
        insertion.counters,
        slots,
        *inserted,
        num_tables,
        POLICY=insertion.policy,
        BUCKET=BUCKET_SLOTS,
        BINS_LOG2=bins.bins_log2,
        CHUNK=_CHUNK,
        TABLES=triton.next_power_of_2(max(num_tables, 1)),
        num_warps=1,
    )


def launch_insert_keys(insertion: KeyInsertion) -> InsertionResults:
    """``torchembed::insert_keys``; see :func:`torchembed.ops.hash_table.insert_keys`."""
    return insert_by(_insert_binned_keys, insertion)
