"""The example in the docstring of each jagged and cross kernel, and 64-bit addresses."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from torchembed.triton_kernels import cross, jagged, row_blocks


def integers(device: torch.device, values: Sequence[Any], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def test_sum_features(device: torch.device) -> None:
    values = integers(device, [7, 8, 9], torch.int64)
    source_offsets = integers(device, [0, 1, 3], torch.int64)
    ranges, sources = (
        integers(device, [0, 1, 2], torch.int64),
        integers(device, [1, 0], torch.int64),
    )
    out_offsets = integers(device, [0, 2, 3], torch.int64)
    out = torch.full_like(values, -9)
    jagged._sum_features_kernel[(2,)](
        values,
        source_offsets,
        ranges,
        sources,
        out,
        out_offsets,
        3,
        3,
        2,
        1,
        FLOATING=False,
        BLOCK=2,
    )
    assert out.tolist() == [8, 9, 7]


def test_bucketize_rows_count(device: torch.device) -> None:
    values = integers(device, [5, 0, 9, 7], torch.int64)
    offsets = integers(device, [0, 3], torch.int64)
    boundaries = integers(device, [[0, 4, 8]], torch.int64)
    buckets, local = torch.full_like(values, -9, dtype=torch.int32), torch.full_like(values, -9)
    lengths = torch.zeros(2, dtype=torch.int32, device=device)
    tile_counts = torch.full((6,), -9, dtype=torch.int32, device=device)
    jagged._bucketize_rows_count_kernel[(2,)](
        values,
        offsets,
        boundaries,
        buckets,
        local,
        lengths,
        tile_counts,
        4,
        1,
        1,
        2,
        BLOCK=2,
    )
    assert buckets.tolist() == [1, 0, 0, 2]
    assert local.tolist() == [1, 0, -1, -1]
    assert lengths.tolist() == [2, 1]
    assert tile_counts.tolist() == [1, 1, 1, 0, 0, 1]


def test_bucketize_rows_place(device: torch.device) -> None:
    buckets = integers(device, [1, 0, 0], torch.int32)
    local = integers(device, [1, 0, -1], torch.int64)
    tile_starts = integers(device, [0, 2, 3], torch.int32)
    new_values, places = torch.full_like(local, -9), torch.full_like(buckets, -9)
    jagged._bucketize_rows_place_kernel[(1,)](
        buckets,
        local,
        None,
        tile_starts,
        new_values,
        None,
        places,
        3,
        2,
        HAS_WEIGHTS=False,
        BLOCK=4,
    )
    assert places.tolist() == [2, 0, 1]
    assert new_values.tolist() == [0, -1, 1]


@pytest.mark.parametrize("x_is_x0", [False, True])
def test_cross_epilogue(x_is_x0: bool, device: torch.device, addresses: str) -> None:
    x0, z, x, grad = (torch.full((1, 1), value, device=device) for value in (2.0, 4.0, 7.0, 3.0))
    bias = torch.ones(1, device=device)
    assert cross.launch_cross_epilogue_forward(x0, z, bias, x).item() == 17
    grad_x0, grad_z, grad_bias = cross.launch_cross_epilogue_backward(grad, x0, z, bias, x_is_x0)
    assert grad_x0.item() == (18 if x_is_x0 else 15)
    assert grad_z.item() == grad_bias.item() == 6


def test_wide_addresses_change_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    bias = torch.arange(300.0, device=device)
    x0 = torch.arange(11 * 300.0, device=device).view(11, 300)
    grad = x0.flip(0)

    def results() -> list[Tensor]:
        return [
            cross.launch_cross_epilogue_forward(x0, grad, bias, x0),
            *cross.launch_cross_epilogue_backward(grad, x0, x0, bias, True),
        ]

    narrow = results()
    monkeypatch.setattr(row_blocks, "NARROW_LIMIT", 0)
    assert row_blocks.index_type(x0) == tl.int64
    for wide, same in zip(results(), narrow, strict=True):
        assert torch.equal(wide, same)
