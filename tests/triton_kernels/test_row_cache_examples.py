"""The examples in the docstrings of the kernels of caches of rows."""

# Kernels take plain numbers as tl.constexpr, which type checkers do not know.
# pyright: reportArgumentType=false

from random import Random

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.core.row_caches import CacheCounter, SlotClaim
from torchembed.ops.row_cache import empty_row_cache
from torchembed.ops.row_cache.reference import claim_slots_reference
from torchembed.triton_kernels import claim_slots, exchange_places, find_cached, move_rows

BLOCK = 4


def longs(device: torch.device, *numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def integers(device: torch.device, *numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def flags(device: torch.device, *are_true: bool) -> Tensor:
    return torch.tensor(are_true, dtype=torch.bool, device=device)


@triton.jit
def _num_wanted_kernel(num_unique_ptr, is_trained_ptr, counter_ptr):
    claim_slots._count(counter_ptr, claim_slots._num_wanted(num_unique_ptr, is_trained_ptr))


@pytest.mark.parametrize(("is_trained", "expected"), [(None, 7), (True, 7), (False, 2)])
def test_num_wanted_and_count(is_trained: bool | None, expected: int, device: torch.device) -> None:
    counter = longs(device, 2)
    given = None if is_trained is None else flags(device, is_trained)
    _num_wanted_kernel[(1,)](integers(device, 5), given, counter)
    assert counter.tolist() == [expected]


def test_sum_of_first(device: torch.device) -> None:
    for num_counts, expected in ((0, 0), (2, 7), (3, 12)):
        total = longs(device, 0)
        _sum_of_first_kernel[(1,)](integers(device, 3, 4, 5), total, num_counts)
        assert total.tolist() == [expected]


@triton.jit(do_not_specialize=["num_counts"])
def _sum_of_first_kernel(counts_ptr, total_ptr, num_counts):
    claim_slots._count(total_ptr, claim_slots._sum_of_first(counts_ptr, num_counts, 2))


def test_claim_slots_mark(device: torch.device) -> None:
    slot_of_row = torch.full((10,), -1, dtype=torch.int32, device=device)
    slot_of_row[5] = 1
    num_missing, walk = integers(device, -9), integers(device, *[-9] * claim_slots._WALK_SIZE)
    last_use, is_recent = longs(device, 1, 1), flags(device, False, False)
    is_dirty, moves = flags(device, False, False), new_moves(device, 3)
    claim_slots._claim_slots_mark_kernel[(1,)](
        *(longs(device, 3, 5, 9, -1), integers(device, 3), None, longs(device, 4)),
        *(slot_of_row, last_use, is_recent, is_dirty, longs(device, 7), num_missing, walk),
        *(*moves, 3),
        BLOCK=BLOCK,
    )
    assert num_missing.tolist() == [2]
    assert last_use.tolist() == [1, 4]
    assert is_recent.tolist() == is_dirty.tolist() == [False, True]
    assert walk[: claim_slots._NUM_MISSING.value].tolist() == [7, 0, 0, 0]
    assert [numbers.tolist() for numbers in moves] == [[-1] * 3] * 3


def new_moves(device: torch.device, num: int) -> tuple[Tensor, Tensor, Tensor]:
    nothing = [-9] * num
    return integers(device, *nothing), longs(device, *nothing), longs(device, *nothing)


@triton.jit
def _list_missing_kernel(
    unique_rows_ptr, slot_of_row_ptr, num_missing_ptr, read_rows_ptr, num_wanted, num_moves
):
    claim_slots._list_missing(
        unique_rows_ptr,
        slot_of_row_ptr,
        num_missing_ptr,
        read_rows_ptr,
        num_wanted,
        num_moves,
        2,
    )


@pytest.mark.parametrize("num_programs", [1, 2, 4])
def test_list_missing(num_programs: int, device: torch.device) -> None:
    slot_of_row = torch.full((10,), -1, dtype=torch.int32, device=device)
    slot_of_row[5] = 1
    for num_moves, expected in ((4, [3, 9, -9, -9]), (1, [3, -9, -9, -9])):
        read = longs(device, -9, -9, -9, -9)
        _list_missing_kernel[(num_programs,)](
            longs(device, 3, 5, 9), slot_of_row, integers(device, 1, 1), read, 3, num_moves
        )
        assert read.tolist() == expected


@triton.jit
def _look_at_tile_kernel(row_of_slot_ptr, last_use_ptr, is_recent_ptr, found_ptr):
    found = claim_slots._look_at_tile(
        row_of_slot_ptr, last_use_ptr, is_recent_ptr, tl.program_id(0), 2, 1, 3, 4
    )
    entry = tl.arange(0, 4)
    tl.store(found_ptr + entry, found[0], mask=found[6])
    tl.store(found_ptr + 4 + entry, found[4].to(tl.int64))
    tl.store(found_ptr + 8 + entry, found[5].to(tl.int64))


def test_look_at_tile(device: torch.device) -> None:
    found = longs(device, *[-9] * 12)
    _look_at_tile_kernel[(1,)](
        longs(device, 5, 6, -1), longs(device, 1, 1, 0), flags(device, False, True, False), found
    )
    assert found.tolist() == [2, 0, 1, -9, 1, 1, 0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("num_programs", [1, 3])
@pytest.mark.parametrize(
    ("missing", "first", "second", "walk"),
    [
        ([1, 0], [0, 2], [2, 0], [2, 2, 2, 1]),
        ([2, 1], [0, 2], [2, 0], [2, 2, 2, 3]),
        ([0, 0], [-9, -9], [-9, -9], [0, 0, 0, 0]),
    ],
)
def test_claim_slots_search(
    missing: list[int],
    first: list[int],
    second: list[int],
    walk: list[int],
    num_programs: int,
    device: torch.device,
) -> None:
    slot_of_row = torch.full((10,), 0, dtype=torch.int32, device=device)
    slot_of_row[: sum(missing)] = -1
    firsts, seconds = integers(device, -9, -9), integers(device, -9, -9)
    of_walk, read = integers(device, 1, 0, 0, 0, -9), longs(device, -9, -9, -9)
    claim_slots._claim_slots_search_kernel[(num_programs,)](
        *(longs(device, 0, 1, 2), integers(device, 3), None, longs(device, 1), slot_of_row),
        *(longs(device, 4, 5, 6, 7), longs(device, 1, 1, 1, 1)),
        *(flags(device, False, True, True, False), integers(device, *missing)),
        *(of_walk, firsts, seconds, read, 4, 2, 2, 3),
        BLOCK=2,
        TILE=2,
    )
    assert (firsts.tolist(), seconds.tolist()) == (first, second)
    # Of programs that find all tiles begun each adds one.
    start, num_tiles, *sums = of_walk.tolist()
    assert (start, min(num_tiles, 2), *sums) == (1, *walk)
    assert read.tolist() == [*range(sum(missing)), *[-9] * (3 - sum(missing))]


@pytest.mark.parametrize("num_programs", [1, 3])
@pytest.mark.parametrize("tile", [2, 4])
def test_claim_slots_take(tile: int, num_programs: int, device: torch.device) -> None:
    slot_of_row = integers(device, -1, -1, -1, -1, 0, 1, 2, 3)
    row_of_slot, last_use = longs(device, 4, 5, 6, 7), longs(device, 1, 1, 1, 1)
    is_recent = flags(device, False, True, True, False)
    is_dirty, hand = flags(device, False, True, False, False), longs(device, 1)
    counters = torch.zeros(len(CacheCounter), dtype=torch.int64, device=device)
    moved, written, read = (
        integers(device, -1, -1, -1),
        longs(device, -1, -1, -1),
        longs(device, 0, 1, 2),
    )
    count, num_refused = longs(device, -9), longs(device, -9)
    first, second = ([0, 2], [2, 0]) if tile == 2 else ([2, -9], [2, -9])
    claim_slots._claim_slots_take_kernel[(num_programs,)](
        *(integers(device, 3), None, longs(device, 4), longs(device, 1), slot_of_row),
        *(row_of_slot, last_use, is_recent, is_dirty, hand, counters),
        *(integers(device, 1, 9, 2, 2, 3), integers(device, *first), integers(device, *second)),
        *(moved, written, read, count, num_refused, 4, 4 // tile, 3),
        BLOCK=BLOCK,
        TILE=tile,
    )
    assert (moved.tolist(), written.tolist()) == ([3, 0, 1], [-1, -1, 5])
    assert (read.tolist(), count.tolist(), num_refused.tolist()) == ([0, 1, 2], [3], [0])
    assert row_of_slot.tolist() == [1, 2, 6, 0]
    assert slot_of_row.tolist() == [3, 0, 1, -1, -1, -1, 2, -1]
    assert last_use.tolist() == [4, 4, 1, 4]
    assert is_recent.tolist() == is_dirty.tolist() == [True, True, False, True]
    assert hand.tolist() == [2]
    assert counters.tolist() == [3, 3, 1, 3, 0]


def test_a_refused_batch_has_no_moves(device: torch.device) -> None:
    slot_of_row, row_of_slot, nothing = (
        integers(device, -1, -1, 0),
        longs(device, 2),
        longs(device, 0),
    )
    counters = torch.zeros(len(CacheCounter), dtype=torch.int64, device=device)
    moved, written, read = integers(device, -1), longs(device, -1), longs(device, 0)
    count, num_refused, is_false = longs(device, -9), longs(device, -9), flags(device, False)
    claim_slots._claim_slots_take_kernel[(2,)](
        *(integers(device, 2), None, longs(device, 4), longs(device, 1), slot_of_row),
        *(row_of_slot, nothing, is_false, is_false, nothing, counters),
        *(integers(device, 0, 9, 1, 0, 2), integers(device, 1), integers(device, 0)),
        *(moved, written, read, count, num_refused, 1, 1, 1),
        BLOCK=BLOCK,
        TILE=2,
    )
    assert (moved.tolist(), written.tolist(), read.tolist()) == ([-1], [-1], [-1])
    assert (count.tolist(), num_refused.tolist()) == ([0], [1])
    assert (slot_of_row.tolist(), row_of_slot.tolist()) == ([-1, -1, 0], [2])
    assert nothing.tolist() == [0]
    assert not is_false.any()
    assert counters.tolist() == [2, 2, 0, 0, 1]


@pytest.mark.parametrize(("block", "tile", "num_programs"), [(4, 2, 5), (16, 4, 32), (8, 16, 3)])
def test_claims_of_many_blocks_and_tiles(
    block: int, tile: int, num_programs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever programs look at them, what is claimed is what the reference claims."""
    for name, size in (("_BLOCK", block), ("_TILE", tile), ("_MOST_PROGRAMS", num_programs)):
        monkeypatch.setattr(claim_slots, name, size)
    num_rows, num_slots, random = 150, 50, Random(block)
    caches = [empty_row_cache(num_rows, num_slots, device) for _ in range(2)]
    for epoch in range(1, 17):
        skewed = {int(num_rows ** random.random()) - 1 for _ in range(random.randrange(1, 60))}
        rows = sorted(skewed) if epoch % 8 else list(range(num_slots + 3))
        claims = [
            SlotClaim(
                longs(device, *rows, -1, -1),
                integers(device, len(rows)),
                longs(device, epoch),
                longs(device, epoch - 1 - epoch % 2),
                None if epoch % 5 else flags(device, epoch % 2 == 0),
                *cache,
            )
            for cache in caches
        ]
        launched = claim_slots.launch_claim_slots(claims[0])
        for result, expected in zip(launched, claim_slots_reference(claims[1]), strict=True):
            assert result.tolist() == expected.tolist()
        for tensor, expected in zip(*caches, strict=True):
            assert tensor.tolist() == expected.tolist()
    assert caches[0].counters.min() > 0


@pytest.mark.parametrize(("fills", "expected"), [(True, [1, 0, 2, -9]), (False, [1, 0, -9, -9])])
def test_exchange_places_regions(fills: bool, expected: list[int], device: torch.device) -> None:
    regions = integers(device, -9, -9, -9, -9)
    exchange_places._exchange_places_regions_kernel[(1,)](
        longs(device, 1, 2, -1),
        longs(device, 2),
        integers(device, 0, 2, 1),
        regions,
        num_regions=2,
        num_moves=3,
        REGION_BITS=1,
        FILLS=fills,
        BLOCK=BLOCK,
    )
    assert regions.tolist() == expected


def test_exchange_places(device: torch.device) -> None:
    place_of_row = integers(device, 0, 2, 1)
    results = integers(device, -9, -9, -9), longs(device, -9, -9, -9), longs(device, -9, -9, -9)
    exchange_places._exchange_places_kernel[(1,)](
        integers(device, 5, 3, -1),
        longs(device, 0, -1, -1),
        longs(device, 1, 2, -1),
        longs(device, 2),
        place_of_row,
        integers(device, 1, 0, -9),
        *results,
        BLOCK=BLOCK,
    )
    assert [rows.tolist() for rows in results] == [[3, 5, -9], [-1, 2, -9], [1, 2, -9]]
    assert place_of_row.tolist() == [2, 0, 1]


def test_find_cached(device: torch.device) -> None:
    given = integers(device, -1, 4, 0), longs(device, 2, -1, 0, 1)
    for num_rows, expected in ((None, [0, 9, 9, 4]), (integers(device, 3), [0, 9, 9, 9])):
        assert find_cached.launch_find_cached(*given, num_rows, 9).tolist() == expected


@triton.jit
def _columns_kernel(out_ptr):
    tl.store(out_ptr + tl.arange(0, 4)[None, :], move_rows._columns(2, 4))


def test_columns(device: torch.device) -> None:
    out = integers(device, 0, 0, 0, 0)
    _columns_kernel[(1,)](out)
    assert out.tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize(("columns", "num_parts"), [((2, 1), 1), ((1, 1), 2)])
def test_move_rows(columns: tuple[int, int], num_parts: int, device: torch.device) -> None:
    cached = tuple(torch.tensor(given, device=device) for given in ([1.0, 2, 3, 4], [5.0, 6]))
    stored = tuple(torch.tensor(given, device=device) for given in ([0.0, 0, 0, 7, 8], [0.0, 9]))
    moves = integers(device, 1), longs(device, 0), longs(device, 1), longs(device, 1)
    move_rows._move_rows_kernel[(2,)](
        *(*moves, cached, stored),
        DIMS=(2, 1),
        STRIDES=(3, 1),
        BLOCK_MOVES=2,
        BLOCKS_D=columns,
        NUM_PARTS=num_parts,
    )
    assert [tensor.tolist() for tensor in cached] == [[1, 2, 7, 8], [5, 9]]
    assert [tensor.tolist() for tensor in stored] == [[3, 4, 0, 7, 8], [6, 9]]


def test_read_rows(device: torch.device) -> None:
    cached = torch.tensor([[1.0, 2.0]], device=device)
    stored = torch.tensor([[3.0, 4.0], [5.0, 6.0]], device=device)
    out = move_rows.launch_read_rows(
        cached, stored, longs(device, 0, -1, -1), longs(device, 0, 1, -1)
    )
    assert out.tolist() == [[1, 2], [5, 6], [0, 0]]


def test_blocks_of_moves_follow_the_widest_rows() -> None:
    tensors = [torch.empty(3, 128), torch.empty(3), torch.empty(3, 2000).half()]
    blocks = move_rows._move_blocks(tensors)
    assert blocks.dims == (128, 1, 2000)
    # 512 threads with four accesses of 16 bytes: 16384 numbers of 16 bits.
    assert (blocks.moves, blocks.columns, blocks.num_parts) == (8, (128, 1, 2048), 1)
    assert move_rows._move_blocks([torch.empty(3, 20000), torch.empty(3)])[1:] == (1, (8192, 1), 3)
