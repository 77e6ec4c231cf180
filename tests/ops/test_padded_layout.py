"""Rows of bags in a dense tensor and back, against a copy of one bag after the other."""

import itertools

import pytest
import torch
from torch import Tensor

from torchembed.ops.padded_layout import PaddedLayout


def by_bag(values: Tensor, offsets: list[int], length: int) -> tuple[Tensor, list[int]]:
    """``[B, length, 2]``, and the place of each row, -1 for none."""
    found = values.new_zeros(len(offsets) - 1, length, *values.shape[1:])
    places = [-1] * len(values)
    for bag, (first, end) in enumerate(itertools.pairwise(offsets)):
        for within in range(min(end - first, length)):
            found[bag, within] = values[first + within]
            places[first + within] = bag * length + within
    return found, places


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize(
    ("lengths", "length"), [([2, 0, 3], 3), ([2, 0, 3], 2), ([0, 0], 4), ([1, 4], 0), ([], 3)]
)
def test_pads_and_packs(
    lengths: list[int], length: int, spare: int, dtype: torch.dtype, device: torch.device
) -> None:
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    num_rows = sum(lengths) + spare
    numbers = torch.arange(1.0, 6 * num_rows + 1, device=device, dtype=dtype)
    values = numbers.view(num_rows, 2, 3).requires_grad_()
    layout = PaddedLayout.of(offsets, length, num_rows)
    expected, places = by_bag(values, offsets.tolist(), length)
    dense = layout.pad(values)
    assert torch.equal(dense, expected)
    assert layout.places.tolist() == places
    packed = layout.pack(dense)
    is_there = (layout.places >= 0).view(-1, 1, 1)
    assert torch.equal(packed, torch.where(is_there, values, 0))
    weights = torch.arange(1.0, packed.numel() + 1, device=device, dtype=dtype).view_as(packed)
    (gradient,) = torch.autograd.grad((packed * weights).sum(), values)
    assert torch.equal(gradient, torch.where(is_there, weights, 0))


def test_whole_numbers_and_numbers_without_columns(device: torch.device) -> None:
    layout = PaddedLayout.of(torch.tensor([0, 1, 3], device=device), 2, 4)
    values = torch.tensor([7, 8, 9, 5], device=device)
    for given in (values, values.float()):
        assert layout.pad(given).tolist() == [[7, 0], [8, 9]]
        assert layout.pack(layout.pad(given)).tolist() == [7, 8, 9, 0]


def test_derivatives_of_every_order(device: torch.device) -> None:
    layout = PaddedLayout.of(torch.tensor([0, 1, 3], device=device), 2, 4)
    values = torch.randn(4, 2, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: layout.pad(x) ** 3, values)
