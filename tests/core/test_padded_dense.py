"""Rows of bags are padded to one length, and their gradients are packed."""

import itertools

import pytest
import torch
from torch import Tensor

from torchembed import JaggedTensor


def jagged(lengths: list[int], spare: int, device: torch.device) -> JaggedTensor:
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    values = torch.arange(1.0, 2 * (sum(lengths) + spare) + 1, device=device).view(-1, 2)
    return JaggedTensor(values.requires_grad_(), offsets)


def by_bag(of: JaggedTensor, length: int, padding: float) -> Tensor:
    bounds = of.offsets().tolist()
    found = of.values().new_full((len(bounds) - 1, length, 2), padding)
    for bag, (first, end) in enumerate(itertools.pairwise(bounds)):
        count = min(end - first, length)
        found[bag, :count] = of.values()[first : first + count]
    return found


@pytest.mark.parametrize("padding", [0.0, -1.0])
@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize(
    ("lengths", "length"), [([2, 0, 3], 3), ([2, 0, 3], 2), ([0, 0], 4), ([1, 4], 0), ([3], 5)]
)
def test_rows_and_gradients_are_those_of_each_bag(
    lengths: list[int], length: int, spare: int, padding: float, device: torch.device
) -> None:
    one, other = jagged(lengths, spare, device), jagged(lengths, spare, device)
    found, expected = one.to_padded_dense(length, padding), by_bag(other, length, padding)
    assert torch.equal(found, expected)
    weights = torch.arange(1.0, found.numel() + 1, device=device).view_as(found)
    gradients = [
        torch.autograd.grad((result * weights).sum(), of.values(), allow_unused=True)[0]
        for result, of in ((found, one), (expected, other))
    ]
    zeros = torch.zeros_like(one.values())
    assert torch.equal(*(zeros if gradient is None else gradient for gradient in gradients))


def test_rows_of_any_shape_and_second_derivatives(device: torch.device) -> None:
    offsets = torch.tensor([0, 2, 2, 3], dtype=torch.int32, device=device)
    values = torch.randn(5, 2, 2, dtype=torch.float64, device=device, requires_grad=True)

    def padded(values: Tensor) -> Tensor:
        return JaggedTensor(values, offsets).to_padded_dense(2, 0.5) ** 3

    assert padded(values).shape == (3, 2, 2, 2)
    assert torch.autograd.gradcheck(padded, values)
    assert torch.autograd.gradgradcheck(padded, values)
    ids = JaggedTensor(torch.tensor([7, 8, 9], device=device), offsets)
    assert ids.to_padded_dense(2, -1.0).tolist() == [[7, 8], [-1, -1], [9, -1]]


def test_a_length_must_be_known(device: torch.device) -> None:
    of = jagged([1], 0, device)
    with pytest.raises(TypeError, match=r"desired_length must be a whole number.*got None; pass"):
        of.to_padded_dense(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        of.to_padded_dense(-1)
