"""The examples in the docstrings of the kernels of caches of rows."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.core.row_caches import CacheCounter
from torchembed.triton_kernels import claim_slots, find_cached, move_rows

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


def test_claim_slots_mark(device: torch.device) -> None:
    slot_of_row = torch.full((10,), -1, dtype=torch.int32, device=device)
    slot_of_row[5] = 1
    row_of_slot, num_missing = longs(device, -1, 5), integers(device, -9)
    batch = longs(device, 3, 5, 9, -1), integers(device, 3), None
    claim_slots._claim_slots_mark_kernel[(1,)](
        *batch, slot_of_row, row_of_slot, num_missing, BLOCK=BLOCK
    )
    assert num_missing.tolist() == [2]
    assert row_of_slot.tolist() == [-1, -7]


@pytest.mark.parametrize("tile", [2, 8])
def test_claim_slots_walk(tile: int, device: torch.device) -> None:
    is_recent = flags(device, False, True, True, False)
    counters = torch.zeros(len(CacheCounter), dtype=torch.int64, device=device)
    first, second = integers(device, -9, -9, -9), integers(device, -9, -9, -9)
    num_first, count, num_refused = integers(device, -9), longs(device, -9), longs(device, -9)
    claim_slots._claim_slots_walk_kernel[(1,)](
        integers(device, 3),
        None,
        longs(device, 1),
        longs(device, 5, 6, 7, 8),
        longs(device, 1, 1, 1, 1),
        is_recent,
        longs(device, 1),
        counters,
        integers(device, 1, 2),
        *(first, second, num_first, count, num_refused),
        4,
        2,
        BLOCK=BLOCK,
        TILE=tile,
    )
    assert first.tolist() == [3, 0, -9]
    assert second.tolist() == [1, 2, -9]
    assert (num_first.tolist(), count.tolist(), num_refused.tolist()) == ([2], [3], [0])
    assert not is_recent.any()
    assert counters.tolist() == [3, 3, 0, 3, 0]


def test_claim_slots_take(device: torch.device) -> None:
    slot_of_row = torch.full((10,), -1, dtype=torch.int32, device=device)
    slot_of_row[5], slot_of_row[7] = 1, 0
    row_of_slot, last_use = longs(device, 7, -7), longs(device, 1, 1)
    is_recent, is_dirty = flags(device, False, False), flags(device, True, False)
    hand = longs(device, 0)
    counters = torch.zeros(len(CacheCounter), dtype=torch.int64, device=device)
    moved, written, read = integers(device, -9, -9), longs(device, -9, -9), longs(device, -9, -9)
    claim_slots._claim_slots_take_kernel[(1,)](
        *(longs(device, 3, 5), integers(device, 2), None, longs(device, 4)),
        *(slot_of_row, row_of_slot, last_use, is_recent, is_dirty, hand, counters),
        *(integers(device, 1), integers(device, 0), integers(device, -9)),
        *(integers(device, 1), longs(device, 1), longs(device, 0)),
        *(moved, written, read, 2, 2),
        BLOCK=BLOCK,
    )
    assert (moved.tolist(), written.tolist(), read.tolist()) == ([0, -1], [7, -1], [3, -1])
    assert row_of_slot.tolist() == [3, 5]
    assert slot_of_row.tolist() == [-1, -1, -1, 0, -1, 1, -1, -1, -1, -1]
    assert last_use.tolist() == [4, 4]
    assert is_recent.all()
    assert is_dirty.all()
    assert hand.tolist() == [1]
    assert counters.tolist() == [0, 0, 1, 0, 0]


def test_a_refused_batch_loses_its_marks(device: torch.device) -> None:
    row_of_slot, nothing = longs(device, -5), longs(device, 0)
    is_false = flags(device, False)
    moved, written, read = integers(device, -9), longs(device, -9), longs(device, -9)
    claim_slots._claim_slots_take_kernel[(1,)](
        *(longs(device, 2, 3), integers(device, 2), None, longs(device, 4)),
        *(integers(device, -1, -1, -1, 0), row_of_slot, nothing, is_false, is_false, nothing),
        *(nothing, integers(device, 1), integers(device, -9), integers(device, -9)),
        *(integers(device, 0), longs(device, 0), longs(device, 1)),
        *(moved, written, read, 1, 1),
        BLOCK=BLOCK,
    )
    assert row_of_slot.tolist() == [3]
    assert (moved.tolist(), written.tolist(), read.tolist()) == ([-1], [-1], [-1])
    assert nothing.tolist() == [0]
    assert not is_false.any()


def test_find_cached(device: torch.device) -> None:
    slots = find_cached.launch_find_cached(integers(device, -1, 4, 0), longs(device, 2, -1, 0, 1))
    assert slots.tolist() == [0, -1, -1, 4]


@triton.jit
def _move_lines_kernel(cached_ptr, stored_ptr):
    zero = tl.zeros([1], tl.int64)
    move_rows._move_lines(cached_ptr, stored_ptr, zero + 1, zero, zero + 1, 1, 1)


def test_move_lines(device: torch.device) -> None:
    cached, stored = (torch.tensor(given, device=device) for given in ([5.0, 6.0], [7.0, 8.0]))
    _move_lines_kernel[(1,)](cached, stored)
    assert (cached.tolist(), stored.tolist()) == ([5, 8], [6, 8])


def test_move_rows(device: torch.device) -> None:
    cached = tuple(torch.tensor(given, device=device) for given in ([1.0, 2, 3, 4], [5.0, 6]))
    stored = tuple(torch.tensor(given, device=device) for given in ([7.0, 8], [9.0]))
    moves = integers(device, 1), longs(device, -1), longs(device, 0), longs(device, 1)
    move_rows._move_rows_kernel[(2,)](
        *moves, cached, stored, DIMS=(2, 1), BLOCK_MOVES=2, BLOCKS_D=(2, 1)
    )
    assert [tensor.tolist() for tensor in cached] == [[1, 2, 7, 8], [5, 9]]
    assert [tensor.tolist() for tensor in stored] == [[7, 8], [9]]


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
    # 128 threads with four accesses of 16 bytes: 4096 numbers of 16 bits.
    assert (blocks.moves, blocks.columns) == (2, (128, 1, 2048))
