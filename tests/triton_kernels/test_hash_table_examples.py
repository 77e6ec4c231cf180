"""The examples in the docstrings of the kernels of hash tables and of initial rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.core.hash_tables import BUCKET_SLOTS, Counter, Policy, SlotTouch, empty_results
from torchembed.core.types import InitializerKind
from torchembed.core.update_records import RowInitialization
from torchembed.ops.hash_table.hashing import hash_keys
from torchembed.triton_kernels import (
    erase_keys,
    insert_keys,
    key_bins,
    touch_slots,
)
from torchembed.triton_kernels.find_slots import _place_in_bucket, launch_find_slots
from torchembed.triton_kernels.hash_places import buckets_of_hash
from torchembed.triton_kernels.initialize_rows import launch_initialize_rows
from torchembed.triton_kernels.insert_keys_results import (
    empty_inserted_keys,
    launch_insert_keys_results,
)
from torchembed.triton_kernels.table_counters import count_by_table

BLOCK = 4


def longs(device: torch.device, *numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def integers(device: torch.device, *numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def counters(device: torch.device, num_tables: int = 1) -> Tensor:
    return torch.zeros(num_tables, len(Counter), dtype=torch.int64, device=device)


@triton.jit
def _buckets_kernel(hashes_ptr, out_ptr):
    hashed = tl.load(hashes_ptr + tl.arange(0, 1)).to(tl.uint64)
    first, second = buckets_of_hash(hashed, 8, 1, 2, 4)
    tl.store(out_ptr + tl.arange(0, 1), first)
    tl.store(out_ptr + 1 + tl.arange(0, 1), second)


def test_buckets_of_hash(device: torch.device) -> None:
    out = longs(device, -9, -9)
    _buckets_kernel[(1,)](longs(device, 0), out)
    assert out.tolist() == [8, 12]


@triton.jit
def _place_kernel(key_ptr, digests_ptr, slot_keys_ptr, out_ptr, BUCKET: tl.constexpr):
    one = tl.arange(0, 1)
    key = tl.load(key_ptr + one)
    first = tl.zeros_like(key)
    place = _place_in_bucket(
        key, one + 9, first, first + 2, one == 0, digests_ptr, slot_keys_ptr, BUCKET
    )
    tl.store(out_ptr + one, place)


def test_place_in_bucket(device: torch.device) -> None:
    digests = torch.tensor([9, 9, 9, 9], dtype=torch.uint8, device=device)
    out = integers(device, -9)
    arguments = (longs(device, 5), digests, longs(device, 4, 5, 5, 5), out)
    _place_kernel[(1,)](*arguments, BUCKET=BUCKET_SLOTS)
    assert out.tolist() == [1]


def test_find_slots(device: torch.device) -> None:
    geometry = longs(device, 0, 1, 1, 4).reshape(1, 4)
    digests = torch.zeros(4, dtype=torch.uint8, device=device)
    hashes = longs(device, 0, 0, 0, 0)
    keys, tables = longs(device, 7, 8), integers(device, 0, 0)
    empty = launch_find_slots(keys, tables, digests, hashes, geometry)
    assert empty.tolist() == [-1, -1]
    # Every digest but that of a free slot: the key is compared.
    for digest in range(1, 256):
        digests[2], hashes[2] = digest, 7
        if launch_find_slots(keys, tables, digests, hashes, geometry).tolist() == [2, -1]:
            return
    raise AssertionError("no digest was that of the key")


def test_touch_slots(device: torch.device) -> None:
    slots, tables = longs(device, 1, 1, -1), integers(device, 0, 0, 0)
    touched, scores, counts = longs(device, 1, 1), longs(device, 3, 4), counters(device)
    touch_slots.launch_touch_slots(
        SlotTouch(
            slots,
            tables,
            int(Policy.LFU),
            longs(device, 5),
            None,
            None,
            None,
            touched,
            scores,
            counts,
        )
    )
    assert (touched.tolist(), scores.tolist()) == ([1, 5], [3, 6])
    assert (counts[0, Counter.HITS], counts[0, Counter.MISSES]) == (2, 1)


def test_finish_scores(device: torch.device) -> None:
    scores = longs(device, 1 << 32 | 5)
    touch_slots._finish_scores_kernel[(1,)](
        longs(device, 0, 0),
        integers(device, 0, 0),
        longs(device, 2),
        None,
        None,
        scores,
        None,
        2,
        POLICY=int(Policy.EPOCH_LFU),
        OVERFLOWS=False,
        BLOCK=BLOCK,
    )
    assert scores.tolist() == [2 << 32 | 5]


@triton.jit
def _count_kernel(tables_ptr, counters_ptr, COUNTER: tl.constexpr):
    position = tl.arange(0, 4)
    table = tl.load(tables_ptr + position, mask=position < 3, other=0)
    count_by_table(table, position < 3, counters_ptr, COUNTER, 1)


def test_count_by_table(device: torch.device) -> None:
    counts = counters(device, 2)
    _count_kernel[(1,)](integers(device, 1, 0, 1), counts, COUNTER=int(Counter.HITS))
    assert counts[:, Counter.HITS].tolist() == [1, 2]


@triton.jit
def _bins_kernel(hashes_ptr, out_ptr):
    index = tl.arange(0, 2)
    hashed = tl.load(hashes_ptr + index).to(tl.uint64, bitcast=True)
    tl.store(out_ptr + index, key_bins.bin_of_hash(hashed, index * 0 + 1, 5))


def test_bin_of_hash(device: torch.device) -> None:
    out = longs(device, -9, -9)
    _bins_kernel[(1,)](longs(device, 0, -1), out)
    assert out.tolist() == [32, 63]


def test_key_bins_count(device: torch.device) -> None:
    counts, ranks = integers(device, *[0] * 32), integers(device, -9, -9, -9)
    slots, slots_out = longs(device, -1, -1, 5), longs(device, -9, -9, -9)
    key_bins._key_bins_count_kernel[(1,)](
        longs(device, 4, 5, 6),
        integers(device, 0, -1, 0),
        slots,
        None,
        None,
        counts,
        ranks,
        slots_out,
        3,
        BINS_LOG2=5,
        BLOCK=BLOCK,
    )
    assert ranks.tolist() == [0, -1, -1]
    assert slots_out.tolist() == slots.tolist()
    assert (counts.sum(), counts[hash_keys(longs(device, 4)) >> 59 & 31]) == (1, 1)


def test_key_bins_fill(device: torch.device) -> None:
    bin_keys, positions = longs(device, -9, -9), integers(device, -9, -9)
    key_bins._key_bins_fill_kernel[(1,)](
        longs(device, 5, 7),
        integers(device, 0, 0),
        integers(device, -1, 0),
        torch.where(torch.arange(32) < int(hash_keys(longs(device, 7)) >> 59 & 31), 0, 1)
        .int()
        .to(device),
        bin_keys,
        positions,
        2,
        BINS_LOG2=5,
        BLOCK=BLOCK,
    )
    assert (bin_keys.tolist(), positions.tolist()) == ([7, -9], [1, -9])


def by_hash(device: torch.device, *keys: int) -> list[int]:
    """``keys`` by their hashes, as unsigned numbers."""
    hashes = hash_keys(longs(device, *keys)) ^ -(2**63)
    return [keys[number] for number in hashes.argsort().tolist()]


@triton.jit
def _next_kernel(keys_ptr, out_ptr, CHUNK: tl.constexpr):
    end = tl.load(out_ptr).to(tl.int32)
    zero = tl.load(out_ptr + 1)
    start = zero.to(tl.int32)
    key, ordered, num_entries, _, num_left, _ = insert_keys._next_key(
        keys_ptr, keys_ptr, None, start, end, zero + 1, zero, zero, start == 0, CHUNK
    )
    tl.store(out_ptr + 2, key)
    tl.store(out_ptr + 3, num_entries)
    tl.store(out_ptr + 4, num_left)
    key, ordered, num_entries, _, num_left, _ = insert_keys._next_key(
        keys_ptr, keys_ptr, None, start, end, zero + 1, zero, ordered, start < 0, CHUNK
    )
    tl.store(out_ptr + 5, key)
    tl.store(out_ptr + 6, num_entries)
    tl.store(out_ptr + 7, num_left)


def test_next_key(device: torch.device) -> None:
    lesser, greater = by_hash(device, 5, 7)
    keys, out = longs(device, greater, lesser, greater), longs(device, 3, 0, *[-9] * 6)
    _next_kernel[(1,)](keys, out, CHUNK=2)
    assert out.tolist()[2:] == [lesser, 1, 2, greater, 2, 0]


def test_insert_keys(device: torch.device) -> None:
    digests = torch.zeros(2, dtype=torch.uint8, device=device)
    slot_keys, touched = longs(device, 0, 0), longs(device, 0, 0)
    slots_out, counts = longs(device, -9, -9), counters(device)
    inserted = empty_inserted_keys(longs(device, 0, 0))
    keys = by_hash(device, 5, 7)
    insert_keys._insert_keys_kernel[(2,)](
        longs(device, *keys),
        integers(device, 1, 0),
        torch.full((32,), 2, dtype=torch.int32, device=device),
        None,
        longs(device, 3),
        None,
        longs(device, 2),
        digests,
        slot_keys,
        touched,
        None,
        longs(device, 0, 1, 1, 2).reshape(1, 4),
        counts,
        slots_out,
        *inserted,
        1,
        POLICY=int(Policy.LRU),
        BUCKET=BUCKET_SLOTS,
        BINS_LOG2=5,
        CHUNK=BLOCK,
        TABLES=1,
        num_warps=1,
    )
    assert (slot_keys.tolist(), touched.tolist()) == (keys, [3, 3])
    assert (slots_out.tolist(), inserted.slots.tolist()) == ([1, 0], [0, 1])
    assert (inserted.keys.tolist(), inserted.is_inserted.tolist()) == (keys, [1, 1])
    assert (counts[0, Counter.SIZE], counts[0, Counter.INSERTED]) == (2, 2)


def test_insert_keys_results(device: torch.device) -> None:
    results = empty_results(longs(device, 0, 0, 0))
    inserted = empty_inserted_keys(longs(device, 0, 0, 0))._replace(
        is_inserted=integers(device, 1, 0, 1),
        keys=longs(device, 10, -9, 12),
        tables=integers(device, 0, -9, 0),
        slots=longs(device, 3, -9, 5),
        is_evicted=torch.zeros(3, dtype=torch.int8, device=device),
    )
    launch_insert_keys_results(inserted, results)
    _, new_keys, new_tables, new_slots, num_new, is_evicted, *_ = results
    assert (new_slots.tolist(), new_keys.tolist()) == ([3, 5, -1], [10, 12, 0])
    assert (new_tables.tolist(), is_evicted.tolist()) == ([0, 0, -1], [False] * 3)
    assert num_new[0] == 2


def test_erase_keys_mark(device: torch.device) -> None:
    for released, expected, counter in ((3, [2, 2, -1], Counter.ERASED), (2, [-1] * 3, None)):
        touched, erased, counts = longs(device, 1, 1, 3), longs(device, 9, 9, 9), counters(device)
        erase_keys._erase_keys_mark_kernel[(1,)](
            longs(device, 2, 2, -1),
            integers(device, 0, 0, 0),
            longs(device, released),
            touched,
            counts,
            erased,
            3,
            BLOCK=BLOCK,
        )
        assert erased.tolist() == expected
        assert counts[0, Counter.IN_USE if counter is None else counter] == 1
        assert counts[0, Counter.SIZE] == (0 if counter is None else -1)


def test_erase_keys(device: torch.device) -> None:
    for erased, expected in ((2, [9, 9, 0]), (-1, [9, 9, 3])):
        touched = longs(device, 9, 9, 3 - 2**63)
        digests = torch.tensor([5, 5, 5], dtype=torch.uint8, device=device)
        slot_keys, scores = longs(device, 4, 4, 4), longs(device, 6, 6, 6)
        erase_keys._erase_keys_kernel[(1,)](
            longs(device, 2),
            longs(device, erased),
            digests,
            slot_keys,
            touched,
            scores,
            1,
            BLOCK=BLOCK,
        )
        assert touched.tolist() == expected
        is_erased = erased == 2
        assert (int(digests[2]), int(slot_keys[2]), int(scores[2])) == (
            (0, 0, 0) if is_erased else (5, 4, 6)
        )


def test_initialize_rows(device: torch.device) -> None:
    weight = torch.zeros(3, 2, device=device)
    launch_initialize_rows(
        RowInitialization(
            weight,
            None,
            None,
            longs(device, 2, -1),
            longs(device, 5, 6),
            integers(device, 0, 0),
            longs(device, 2),
            longs(device, 1),
            integers(device, InitializerKind.CONSTANT),
            torch.tensor([[7.0, 0.0]], device=device),
            None,
            0.0,
        )
    )
    assert weight.tolist() == [[0, 0], [0, 0], [7, 7]]
