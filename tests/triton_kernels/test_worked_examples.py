"""The example in each kernel's docstring."""

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.core.types import OnBadId, OptimizerKind
from torchembed.core.update_records import RowUpdate
from torchembed.triton_kernels import (
    bags,
    gradient_map,
    id_shares,
    linearize_ids,
    pooled_lookup,
    rounding,
    row_codec,
    rowwise_update,
    run_sums,
    searching,
    segments,
    sequence_lookup,
)


def integers(device: torch.device, *values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def column(device: torch.device, *values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)


def test_linearize_ids(device: torch.device) -> None:
    values = integers(device, 2, 0, 1, 3, 4, 0)
    first_rows = integers(device, 0, 3, dtype=torch.int64)
    num_rows = integers(device, 3, 4, dtype=torch.int64)
    for on_bad_id, at_bad in ((OnBadId.ZERO, -1), (OnBadId.CLAMP, 6)):
        rows, first_bad = linearize_ids.launch_linearize_ids(
            values, None, [1, 2], first_rows, num_rows, 2, on_bad_id, torch.int64
        )
        assert rows.tolist() == [2, 0, 4, 6, at_bad, 3]
        assert first_bad.tolist() == [4]


def test_id_shares(device: torch.device) -> None:
    ids = integers(device, -1, 0, 1, 2, 3, 4, dtype=torch.int64)
    assert id_shares.launch_shares_of_ids(ids[:4], 2).tolist() == [0, 1, 1, 1]
    assert id_shares.launch_shares_of_ids(ids[:5], 3).tolist() == [1, 1, 2, 2, 1]
    num_shares = integers(device, 1, 3, dtype=torch.int64)
    asked = integers(device, 0, 2, dtype=torch.int64)
    found = id_shares.launch_are_in_share(ids, [1, 2], num_shares, asked, 2)
    assert found.int().tolist() == [1, 1, 1, 1, 0, 0]


def test_row_codec(device: torch.device) -> None:
    rows = torch.tensor([[1, -1.0625], [1, 1.9375], [0, 0]], device=device)
    codes = row_codec.launch_encode_rows(rows)
    assert codes.tolist() == [[0x70, 0xF0, 120], [0x68, 0x70, 121], [0, 0, 1]]
    decoded = row_codec.launch_decode_rows(codes, torch.float16)
    assert decoded.tolist() == [[1, -1], [1, 2], [0, 0]]
    elements, scales = row_codec.launch_scaled_rows(rows)
    assert elements.view(torch.uint8).tolist() == [[0x70, 0xF0], [0x68, 0x70], [0, 0]]
    assert scales.tolist() == [[2.0**-7], [2.0**-6], [2.0**-126]]


def test_find_runs_count(device: torch.device) -> None:
    sorted_rows = integers(device, -1, 2, 2, 5, 5, 7)
    counts = integers(device, -9, -9)
    segments._find_runs_count_kernel[(2,)](sorted_rows, counts, 6, BLOCK=4, INDEX=tl.int32)
    assert counts.tolist() == [2, 1]


def test_find_runs(device: torch.device) -> None:
    sorted_rows = integers(device, -1, 2, 2, 5, 5, 7)
    sorted_order = integers(device, 3, 0, 4, 1, 2, 5, dtype=torch.int64)
    unique_rows, starts = integers(device, *[-9] * 6), integers(device, *[-9] * 7)
    order, num_runs = integers(device, *[-9] * 6), integers(device, -9)
    chunk_runs = integers(device, *[-9] * 3)
    segments._find_runs_kernel[(2,)](
        sorted_rows,
        sorted_order,
        integers(device, 2, 1),
        unique_rows,
        starts,
        order,
        num_runs,
        chunk_runs,
        6,
        2,
        CHUNK=2,
        BLOCK=4,
        INDEX=tl.int32,
    )
    assert unique_rows.tolist() == [2, 5, 7, -1, -1, -1]
    assert starts.tolist() == [1, 3, 5, 6, 6, 6, 6]
    assert order.tolist() == sorted_order.tolist()
    assert num_runs.tolist() == [3]
    assert chunk_runs.tolist() == [0, 1, 2]


def test_find_runs_chunks(device: torch.device) -> None:
    chunk_runs, starts = integers(device, 0, 1, 2), integers(device, 1, 3, 5, 6)
    segments._find_runs_chunks_kernel[(1,)](chunk_runs, starts, 3, CHUNK=2, BLOCK=4, INDEX=tl.int32)
    assert chunk_runs.tolist() == [0, 1, -1]


def test_sequence_lookup_forward(device: torch.device) -> None:
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device)
    rows = integers(device, 1, -1, 0)
    out = sequence_lookup.launch_sequence_lookup_forward(weight, rows, torch.float32)
    assert out.tolist() == [[3, 4], [0, 0], [1, 2]]


def test_pooled_lookup_forward(device: torch.device) -> None:
    weight = column(device, 10, 20, 30)
    rows, offsets = integers(device, 0, 2, 2, 1, -1), integers(device, 0, 2, 2, 3, 5)
    for mean, expected in ((False, [[40, 30], [0, 20]]), (True, [[20, 30], [0, 10]])):
        out = pooled_lookup.launch_pooled_lookup_forward(
            weight, rows, offsets, [], None, 2, 2, mean, torch.float32
        )
        assert out.squeeze(2).tolist() == expected


def test_pooled_lookup_gradient_map(device: torch.device) -> None:
    rows, offsets = integers(device, 0, 2, 2, 1, -1), integers(device, 0, 2, 2, 3, 5)
    gradient_rows, scales = gradient_map.launch_pooled_lookup_gradient_map(
        rows, offsets, [], None, 2, 2, True
    )
    assert gradient_rows.tolist() == [0, 0, 1, 3, 3]
    assert scales.tolist() == [0.5, 0.5, 1, 0.5, 0.5]


def test_pooled_lookup_weights_backward(device: torch.device) -> None:
    grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device).unsqueeze(0)
    weight = torch.tensor([[5.0, 6.0], [7.0, 8.0]], device=device)
    # One sample; its two features hold the ids [1] and [0, -1].
    out = pooled_lookup.launch_pooled_lookup_weights_backward(
        grad, weight, integers(device, 1, 0, -1), None, [1, 2], False
    )
    assert out.tolist() == [23, 39, 0]


def test_rowwise_update_chunks(device: torch.device) -> None:
    starts, chunk_runs = integers(device, 1, 6, 7), integers(device, 0, 0, -1)
    chunk_sums, group_sums = column(device, -9, -9, -9), column(device, -9)
    order = torch.arange(7, dtype=torch.int32, device=device)
    gradients = column(device, 1, 2, 3, 4, 5, 6, 7)
    for sums, each, grad, span in (
        (chunk_sums, order, gradients, 1),
        (group_sums, None, chunk_sums, 2),
    ):
        run_sums._rowwise_update_chunks_kernel[(1, 1)](
            sums,
            starts,
            each,
            chunk_runs,
            grad,
            None,
            None,
            len(sums),
            SPAN=span,
            CHUNK=2,
            DIM=1,
            BLOCK_WINDOWS=4,
            BLOCK_D=1,
            UNROLL=2,
            INDEX=tl.int32,
        )
    assert chunk_sums.squeeze(1).tolist() == [5, 9, -9]
    assert group_sums.squeeze(1).tolist() == [14]


def test_rowwise_update_adam_step(device: torch.device) -> None:
    step_size, one = torch.zeros(1, device=device), torch.ones(1, device=device)
    rowwise_update._rowwise_update_adam_step_kernel[(1,)](
        step_size, one, one, LOG_BETA1=-math.inf, LOG_BETA2=math.log(0.75)
    )
    assert step_size.tolist() == [0.5]


def test_rowwise_update(device: torch.device) -> None:
    weight, num_ids = column(device, 10, 20), 2
    runs = (
        integers(device, 1, -1),
        integers(device, 0, 2, 2),
        torch.arange(num_ids, dtype=torch.int32, device=device),
        integers(device, 1),
        integers(device),
    )
    rowwise_update.launch_rowwise_update(
        RowUpdate(
            weight,
            None,
            None,
            *runs,
            column(device, 3, 4),
            *[None] * 2,
            torch.full((1,), 2.0, device=device),
            *[None] * 6,
            int(OptimizerKind.SGD),
            *[0.0] * 5,
        )
    )
    assert weight.squeeze(1).tolist() == [10, 6]


def test_locate_bad_id(device: torch.device) -> None:
    location = torch.full((4,), -9, device=device)
    linearize_ids.launch_locate_bad_id(
        torch.tensor([7, 1, 9], device=device),
        torch.tensor([2], device=device),
        torch.tensor([0, 1, 3], device=device),
        location,
    )
    assert location.tolist() == [2, 9, 1, 1]


@triton.jit
def _count_kernel(entries_ptr, values_ptr, counts_ptr, BLOCK: tl.constexpr):
    value = tl.load(values_ptr + tl.arange(0, BLOCK))
    count = searching.count_not_above(entries_ptr, 4, value, 1, 1)
    tl.store(counts_ptr + tl.arange(0, BLOCK), count)


def test_count_not_above(device: torch.device) -> None:
    counts = integers(device, -9, -9, -9, -9)
    _count_kernel[(1,)](
        integers(device, 0, 2, 2, 5), integers(device, 2, -1, 4, 9), counts, BLOCK=4
    )
    assert counts.tolist() == [3, 0, 3, 4]


@triton.jit
def _count_each_kernel(entries_ptr, counts_ptr, BLOCK: tl.constexpr, MOST: tl.constexpr):
    first = tl.program_id(0) * BLOCK - 2
    counts = searching.count_not_above_each(entries_ptr, 4, first, 1, 1, BLOCK, MOST)
    tl.store(counts_ptr + first + 2 + tl.arange(0, BLOCK), counts)


@pytest.mark.parametrize("most", [0, searching.most_entries(4), 8])
def test_count_not_above_each(most: int, device: torch.device) -> None:
    counts = integers(device, *[-9] * 12)
    _count_each_kernel[(3,)](integers(device, 0, 2, 2, 7), counts, BLOCK=4, MOST=most)
    # Of -2 to 1, where an entry lies between; of 2 to 5, where none does; of 6 to 9.
    assert counts.tolist() == [0, 0, 1, 1, 3, 3, 3, 3, 3, 4, 4, 4]


@triton.jit
def _extent_kernel(bounds_ptr, out_ptr, BLOCK: tl.constexpr):
    sample = tl.arange(0, BLOCK)
    feature = bags.feature_at(bounds_ptr, 0, 2, True)
    start, length = bags.bag_extent(bounds_ptr, feature, sample, 2, sample < 2, True, tl.int32)
    tl.store(out_ptr + sample, start)
    tl.store(out_ptr + BLOCK, feature)
    tl.store(out_ptr + BLOCK + 1, length)


def test_bag_extent(device: torch.device) -> None:
    bounds = bags.bag_bounds(None, [1, 3], device)
    assert bounds.tensor.tolist() == [0, 1, 4, 1, 0]
    out = integers(device, *[-9] * 4)
    _extent_kernel[(1,)](bounds.tensor, out, BLOCK=2)
    assert out.tolist() == [2, 5, 1, 3]


@triton.jit
def _round_kernel(values_ptr, random_ptr, out_ptr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    random = tl.load(random_ptr + index).to(tl.uint64)
    rounded = rounding.stochastic_round(
        tl.load(values_ptr + index), random, out_ptr.dtype.element_ty
    )
    tl.store(out_ptr + index, rounded)


def test_stochastic_round(device: torch.device) -> None:
    values = torch.full((2,), 1 + 2.0**-9, device=device)
    random = integers(device, 0xC000 - 2**16, 0xBFFF - 2**16, dtype=torch.int64) << 48
    out = torch.zeros(2, dtype=torch.bfloat16, device=device)
    _round_kernel[(1,)](values, random, out, BLOCK=2)
    assert out.tolist() == [1 + 2.0**-7, 1]
