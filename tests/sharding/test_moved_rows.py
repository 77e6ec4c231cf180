"""Rows of a matrix are moved, and their gradients move back."""

import pytest
import torch
from torch import Tensor

from torchembed.sharding.transport.moved_rows import RowMoves, moved, moves_from, moves_to


def test_moves_follow_from_sources_and_from_targets(device: torch.device) -> None:
    sources = torch.tensor([2, -1, 0, -1], device=device)
    found = moves_from(sources, 4)
    assert found.targets.tolist() == [2, -1, 0, -1]
    assert moves_to(found.targets, 4).sources.tolist() == sources.tolist()
    assert moves_to(torch.tensor([1, -1, 2], device=device), 5).sources.tolist() == [
        -1,
        0,
        2,
        -1,
        -1,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_and_gradients_are_where_they_are_moved(
    dtype: torch.dtype, device: torch.device
) -> None:
    rows = torch.arange(12, dtype=dtype, device=device).view(4, 3).requires_grad_()
    result = moved(rows, moves_from(torch.tensor([3, -1, 1, 0, -1], device=device), 4))
    assert result[:, 0].tolist() == [9, 0, 3, 0, 0]
    assert result.dtype is dtype
    result.backward(torch.arange(15, dtype=dtype, device=device).view(5, 3))
    assert isinstance(rows.grad, Tensor)
    assert rows.grad[:, 0].tolist() == [9, 6, 0, 0]


def test_there_may_be_no_rows(device: torch.device) -> None:
    none = torch.zeros(0, dtype=torch.int64, device=device)
    rows = torch.zeros(0, 3, device=device, requires_grad=True)
    found = moved(rows, moves_from(torch.tensor([-1, -1], device=device), 0))
    assert found.tolist() == [[0, 0, 0]] * 2
    found.sum().backward()
    assert moved(torch.ones(2, 3, device=device), moves_from(none, 2)).shape == (0, 3)
    assert isinstance(moves_to(none, 0), RowMoves)
