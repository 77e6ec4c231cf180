"""Caches of rows: what claims, moves, dirty rows and reads past the cache give."""

import pytest
import torch
from torch import Tensor

from tests.support.repeats import assert_repeats
from tests.support.row_cache_model import ModelledCache, moves_of, row_moves
from tests.support.sizes import Sizes
from tests.support.tolerance import assert_same_bits
from tests.support.tracing import compiled_once
from tests.support.values import not_contiguous
from torchembed.ops.row_cache import (
    CacheCounter,
    ClaimedSlots,
    RowCache,
    claim_slots,
    dirty_moves,
    empty_row_cache,
    find_cached,
    forget_rows,
    move_rows,
    read_rows,
)
from torchembed.ops.segments import find_runs


def claim(
    cache: RowCache,
    rows: list[int],
    epoch: int,
    released: int | None = None,
    *,
    dtype: torch.dtype = torch.int64,
    is_trained: bool | None = None,
) -> ClaimedSlots:
    """Claim the slots of a batch; all before it are released unless ``released`` says otherwise."""
    device = cache.hand.device
    ids = torch.tensor(rows, dtype=dtype, device=device)
    runs = find_runs(ids, cache.slot_of_row.numel())
    return claim_slots(
        cache,
        runs.unique_rows,
        runs.num_runs,
        epoch=torch.tensor([epoch], device=device),
        released=torch.tensor([epoch - 1 if released is None else released], device=device),
        is_trained=None if is_trained is None else torch.tensor([is_trained], device=device),
    )


def slots_of(cache: RowCache, *rows: int) -> list[int]:
    return find_cached(cache.slot_of_row, torch.tensor(rows, device=cache.hand.device)).tolist()


def copy_of(cache: RowCache) -> RowCache:
    return RowCache(*(tensor.clone() for tensor in cache))


def test_worked_example_of_claims(device: torch.device) -> None:
    cache = empty_row_cache(10, 2, device)
    claim(cache, [5], 1)
    cache.hand.zero_()
    assert moves_of(claim(cache, [9, 5, -1, 9], 2).moves) == [(1, -1, 9)]
    assert slots_of(cache, 9, 5, -1, 9) == [1, 0, -1, 1]
    assert cache.hand.tolist() == [0]
    assert moves_of(claim(cache, [7], 3).moves) == [(0, 5, 7)]


def test_rows_take_slots_in_ascending_order(device: torch.device) -> None:
    cache = empty_row_cache(10, 6, device)
    claimed = claim(cache, [8, 2, 8, -1, 5], 1, dtype=torch.int32)
    assert slots_of(cache, 8, 2, 8, -1, 5) == [2, 0, 2, -1, 1]
    assert moves_of(claimed.moves) == [(0, -1, 2), (1, -1, 5), (2, -1, 8)]
    assert claimed.moves.slots.numel() == 5
    assert (claimed.moves.slots.dtype, claimed.moves.read_rows.dtype) == (torch.int32, torch.int64)


def test_a_working_set_of_all_slots_fits_and_one_row_more_does_not(device: torch.device) -> None:
    cache = empty_row_cache(12, 4, device)
    claim(cache, [0, 1, 2, 3], 1)
    assert claim(cache, [3, 4, 5, 6], 2).num_refused.tolist() == [0]
    before = copy_of(cache)
    refused = claim(cache, [3, 7, 8, 9, 7, 10], 3)
    assert refused.num_refused.tolist() == [1]
    assert moves_of(refused.moves) == []
    counted = cache.counters - before.counters
    assert counted.tolist() == [5, 4, 0, 0, 1]
    # Row 3 stays until the batch is released; nothing else has changed.
    assert cache.last_use.tolist() == [2, 2, 2, 3]
    before.last_use[3] = 3
    for tensor, expected in zip(cache[:-1], before[:-1], strict=True):
        assert_same_bits(tensor, expected)
    assert moves_of(claim(cache, [7, 8, 9], 4, released=2).moves) == [
        (0, 4, 7),
        (1, 5, 8),
        (2, 6, 9),
    ]


def test_cached_rows_of_a_refused_batch_are_used(device: torch.device) -> None:
    cache = empty_row_cache(12, 2, device)
    claim(cache, [0, 1], 1)
    dirty_moves(cache)
    cache.is_recent.zero_()
    assert claim(cache, [1, 2, 3], 2).num_refused.tolist() == [1]
    assert cache.is_recent.tolist() == cache.is_dirty.tolist() == [False, True]
    assert (cache.last_use.tolist(), cache.hand.tolist()) == ([1, 2], [0])


def test_rows_of_batches_under_way_stay(device: torch.device) -> None:
    cache = empty_row_cache(12, 4, device)
    claim(cache, [0, 1], 1)
    claim(cache, [2, 3], 2, released=0)
    assert claim(cache, [4], 3, released=0).num_refused.tolist() == [1]
    assert moves_of(claim(cache, [4, 5], 4, released=1).moves) == [(0, 0, 4), (1, 1, 5)]
    assert claim(cache, [6, 7, 8], 5, released=2).num_refused.tolist() == [1]


def test_the_hand_passes_recent_slots_once(device: torch.device) -> None:
    cache = empty_row_cache(12, 4, device)
    claim(cache, [0, 1, 2, 3], 1)
    # All are recent: a whole round makes none of them recent, and the second one begins at slot 0.
    assert moves_of(claim(cache, [4], 2).moves) == [(0, 0, 4)]
    assert cache.is_recent.tolist() == [True, False, False, False]
    claim(cache, [1], 3)
    assert cache.is_recent.tolist() == [True, True, False, False]
    # Slot 1 is passed, slot 2 taken; in the next claim the hand goes on at slot 3.
    assert moves_of(claim(cache, [5], 4).moves) == [(2, 2, 5)]
    assert cache.is_recent.tolist() == [True, False, True, False]
    assert cache.hand.tolist() == [3]
    # The first round takes slots 3 and 1, the second one slot 0; row 5 in slot 2 is wanted.
    claimed = claim(cache, [6, 7, 8, 5], 5)
    assert moves_of(claimed.moves) == [(3, 3, 6), (1, 1, 7), (0, 4, 8)]
    assert slots_of(cache, 6, 7, 8, 5) == [3, 1, 0, 2]
    assert cache.hand.tolist() == [1]
    assert cache.is_recent.tolist() == [True] * 4


def test_free_slots_are_taken_as_the_hand_reaches_them(device: torch.device) -> None:
    cache = empty_row_cache(12, 5, device)
    claim(cache, [0, 1], 1)
    assert moves_of(claim(cache, [5, 6, 7], 2, released=0).moves) == [
        (2, -1, 5),
        (3, -1, 6),
        (4, -1, 7),
    ]
    assert cache.counters.tolist() == [5, 5, 0, 5, 0]


@pytest.mark.parametrize("rows", [[], [-1, -1], [4] * 5])
def test_batches_of_few_rows(rows: list[int], device: torch.device) -> None:
    cache = empty_row_cache(6, 3, device)
    claimed = claim(cache, rows, 1)
    expected = [(0, -1, 4)] if 4 in rows else []
    assert moves_of(claimed.moves) == expected
    assert claimed.moves.slots.numel() == min(len(rows), 3)
    assert cache.counters.tolist() == [len(expected), len(expected), 0, len(expected), 0]


def test_a_batch_that_is_not_trained_changes_nothing(device: torch.device) -> None:
    cache = empty_row_cache(6, 3, device)
    claim(cache, [4, 1], 1)
    before = copy_of(cache)
    untrained = claim(cache, [1, 2, -1, 4, 0], 2, is_trained=False)
    assert untrained.num_refused.tolist() == [0]
    assert moves_of(untrained.moves) == []
    for tensor, expected in zip(cache, before, strict=True):
        assert_same_bits(tensor, expected)


def test_a_table_without_rows(device: torch.device) -> None:
    cache = empty_row_cache(0, 2, device)
    assert moves_of(claim(cache, [-1, -1], 1).moves) == []
    assert slots_of(cache, -1, -1) == [-1, -1]


def test_rows_need_not_be_contiguous(device: torch.device) -> None:
    cache = empty_row_cache(10, 4, device)
    rows = not_contiguous(torch.tensor([2, 5, 8], device=device))
    count = torch.tensor([2], dtype=torch.int32, device=device)
    one = torch.ones(1, dtype=torch.int64, device=device)
    claim_slots(cache, rows, count, epoch=one, released=one - 1)
    assert find_cached(cache.slot_of_row, rows).tolist() == [0, 1, -1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_without_a_slot_are_found_where_the_caller_says(
    dtype: torch.dtype, device: torch.device
) -> None:
    cache = empty_row_cache(10, 4, device)
    claim(cache, [7, 2], 1)
    rows = torch.tensor([2, 5, -1, 7, 2], dtype=dtype, device=device)
    expected = {None: [0, 99, 99, 1, 0], 4: [0, 99, 99, 1, 99], 1: [0] + [99] * 4, 0: [99] * 5}
    for num, slots in expected.items():
        num_rows = None if num is None else torch.tensor([num], dtype=torch.int32, device=device)
        found = find_cached(cache.slot_of_row, rows, num_rows=num_rows, no_slot=99)
        assert (found.dtype, found.tolist()) == (dtype, slots)


def test_dirty_rows_are_written_once(device: torch.device) -> None:
    cache = empty_row_cache(10, 4, device)
    claim(cache, [7, 2, 9], 1)
    assert moves_of(dirty_moves(cache)) == [(0, 2, -1), (1, 7, -1), (2, 9, -1)]
    claim(cache, [7], 2)
    assert moves_of(dirty_moves(cache)) == [(1, 7, -1)]
    assert moves_of(dirty_moves(cache)) == []
    assert cache.counters[CacheCounter.WRITTEN_ROWS] == 4
    # What is clean is not written when others take its slot.
    assert moves_of(claim(cache, [0, 1], 3).moves) == [(3, -1, 0), (0, -1, 1)]


def test_what_is_forgotten_is_free(device: torch.device) -> None:
    cache = empty_row_cache(10, 3, device)
    claim(cache, [7, 2], 1)
    forget_rows(cache)
    fresh = empty_row_cache(10, 3, device)
    for tensor, expected in zip(cache[:-1], fresh[:-1], strict=True):
        assert_same_bits(tensor, expected)
    assert cache.counters[CacheCounter.READ_ROWS] == 2


def test_more_rows_than_int32_holds() -> None:
    """Shapes only: a cache for them takes its 4 bytes of each row."""
    cache = empty_row_cache(2**33, 5, "meta")
    one = torch.ones(1, dtype=torch.int64, device="meta")
    rows = torch.empty(9, dtype=torch.int64, device="meta")
    claimed = claim_slots(cache, rows, one.int(), epoch=one, released=one)
    assert claimed.moves.slots.shape == (5,)
    stored = torch.empty(2**33, 128, device="meta")
    move_rows(claimed.moves, [torch.empty(5, 128, device="meta")], [stored])


def test_caches_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"^num_slots must be in \[1, 2147483648\), got 0$"):
        empty_row_cache(3, 0)
    with pytest.raises(ValueError, match=r"^num_slots must be in .*, got 2147483648$"):
        empty_row_cache(3, 2**31)
    with pytest.raises(ValueError, match=r"^num_rows must not be negative, got -1$"):
        empty_row_cache(-1, 3)


def test_repeats_its_bits(device: torch.device, sizes: Sizes, fastest_algorithms: None) -> None:
    """With any number of threads: each part of a batch that a thread takes is small enough."""
    num_slots = sizes.num_parallel_ids
    num_rows = 4 * num_slots

    def run() -> list[Tensor]:
        cache = empty_row_cache(num_rows, num_slots, device)
        cached = [torch.zeros(num_slots, 3, device=device), torch.zeros(num_slots, device=device)]
        stored = [torch.arange(3.0 * num_rows).view(-1, 3), torch.arange(1.0 * num_rows)]
        stored = [tensor.to(device) for tensor in stored]
        results = []
        for epoch in (1, 2, 3):
            generator = torch.Generator().manual_seed(epoch)
            rows = torch.randint(-1, num_rows, (num_slots,), generator=generator)
            claimed = claim(cache, rows.tolist(), epoch)
            move_rows(claimed.moves, cached, stored)
            rows = rows.to(device)
            slots = find_cached(cache.slot_of_row, rows)
            read = read_rows(cached[0], stored[0], slots, rows)
            assert torch.equal(read[:, 1], torch.where(rows < 0, 0.0, 3.0 * rows + 1.0))
            results += [*claimed.moves, slots, read]
        return [*results, *cache, *cached, *stored]

    assert_repeats(run)


def test_opcheck(device: torch.device) -> None:
    cache = empty_row_cache(10, 4, device)
    claim(cache, [7, 2, 9], 1)
    ops = torch.ops.torchembed
    rows = torch.tensor([0, 3, 7, -1, -1], device=device)
    two = torch.tensor([2], device=device)
    one = two.int() // 2
    for trained in (None, two > 1):
        arguments = (rows, 3 * one, two, two - 1, trained, *copy_of(cache))
        torch.library.opcheck(ops.claim_slots.default, arguments)
    cached = [torch.ones(4, 3, device=device), torch.ones(4, device=device)]
    stored = [torch.zeros(10, 3, device=device), torch.zeros(10, device=device)]
    given = row_moves(device, (1, 2, 3))
    torch.library.opcheck(ops.move_rows.default, (*given, cached, stored))
    for num_rows, no_slot in ((None, -1), (2 * one, 7)):
        arguments = (cache.slot_of_row, rows, num_rows, no_slot)
        torch.library.opcheck(ops.find_cached.default, arguments)
    no_slots = torch.full_like(rows, -1)
    torch.library.opcheck(ops.read_rows.default, (cached[0], stored[0], no_slots, rows))


def test_compiles_whole_and_once_for_every_size(device: torch.device) -> None:
    model = ModelledCache(40, 12, device)
    # On the device, since a program that is not optimized copies what it writes, and a copy of
    # pinned memory is not pinned.
    stored = model.stored[0].to(device)

    def admitted(cache: RowCache, rows: Tensor, epoch: Tensor, weight: Tensor) -> Tensor:
        runs = find_runs(rows, 40)
        claimed = claim_slots(
            cache, runs.unique_rows, runs.num_runs, epoch=epoch, released=epoch - 1
        )
        move_rows(claimed.moves, [weight], [stored])
        slots = find_cached(cache.slot_of_row, rows)
        return read_rows(weight, stored, slots, rows) + slots[:, None]

    compiled = compiled_once(admitted)
    for number, num_ids in enumerate((6, 7, 9), start=1):
        rows = torch.arange(num_ids, device=device) * number
        epoch = torch.tensor([number], device=device)
        expected = admitted(copy_of(model.cache), rows, epoch, model.cached[0].clone())
        assert torch.equal(compiled(model.cache, rows, epoch, model.cached[0]), expected)
