"""Decisions of launchers on the host: addresses, blocks, and what they keep on the device."""

import pytest
import torch
import triton
import triton.language as tl

from torchembed.triton_kernels import bags, sort_rows
from torchembed.triton_kernels.bags import bag_bounds
from torchembed.triton_kernels.launch_sizes import cdiv, next_power_of_2
from torchembed.triton_kernels.row_blocks import NARROW_LIMIT, index_type, row_block


@pytest.mark.parametrize(
    ("num_elements", "expected"),
    [
        (0, tl.int32),
        (NARROW_LIMIT - 1, tl.int32),
        (NARROW_LIMIT, tl.int64),
        (2**31, tl.int64),
        (2**40, tl.int64),
    ],
)
def test_addresses_are_wide_where_a_tensor_is_large(num_elements: int, expected: tl.dtype) -> None:
    tensor = torch.empty(num_elements, dtype=torch.float16, device="meta")
    small = torch.empty(3, device="meta")
    assert index_type(tensor) == expected
    assert index_type(small, None, tensor) == expected


def test_addresses_count_elements_and_not_rows() -> None:
    assert index_type(torch.empty(2**24, 128, device="meta")) == tl.int64
    assert index_type(torch.empty(2**24, 64, device="meta")) == tl.int32


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 127, 128, 129, 2**31 + 1])
def test_sizes_of_launches_are_tritons(count: int) -> None:
    assert next_power_of_2(count) == triton.next_power_of_2(count)
    for size in (1, 3, 128):
        assert cdiv(count, size) == triton.cdiv(count, size)


@pytest.mark.parametrize("dim", [1, 2, 3, 8, 100, 128, 512, 1030, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_block_gives_each_thread_one_access(dim: int, dtype: torch.dtype) -> None:
    block = row_block(dim, dtype)
    assert block.rows * block.columns * dtype.itemsize == 128 * 16
    assert block.columns >= dim or block.rows == 1
    assert block.columns < 2 * dim


def test_a_block_fits_the_widest_dtype() -> None:
    assert row_block(64, torch.float16, torch.float32) == row_block(64, torch.float32)


def test_bounds_of_a_hotness_are_made_once(device: torch.device) -> None:
    bounds = bag_bounds(None, [2, 0, 3], device)
    assert bounds.fixed
    assert bounds.tensor.tolist() == [0, 2, 2, 5, 2, 0, 1]
    assert bag_bounds(None, (2, 0, 3), device).tensor is bounds.tensor
    assert bag_bounds(None, [2, 0], device).tensor is not bounds.tensor


def test_bounds_do_not_pile_up(device: torch.device) -> None:
    limit = bags._fixed_bounds.cache_info().maxsize
    assert limit is not None
    for count in range(limit + 5):
        bag_bounds(None, [count, 12345], device)
    assert bags._fixed_bounds.cache_info().currsize == limit


def test_offsets_are_bounds_as_they_are(device: torch.device) -> None:
    offsets = torch.tensor([0, 1, 4], device=device)
    bounds = bag_bounds(offsets, [], device)
    assert bounds.tensor is offsets
    assert not bounds.fixed


def test_a_sort_that_does_not_run_is_left_to_torch() -> None:
    def fails(rows: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        raise RuntimeError("sorting rows on the GPU failed: CUDA driver version is insufficient")

    def runs(rows: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return rows, rows

    device = torch.device("cpu")
    assert sort_rows._that_runs(runs, device) is runs
    words = (
        r"sorts rows by torch's kernels.* do not run on cpu \(sorting .* driver version is insuff"
    )
    with pytest.warns(UserWarning, match=words):
        assert sort_rows._that_runs(fails, device) is None
