"""``side_by_side`` beside ``torch.cat``: with columns reserved in memory, and where they do not
fit."""

import pytest
import torch
from torch import Tensor

from tests.support.tolerance import assert_same_bits
from tests.support.tracing import compiled_once
from tests.support.values import normal
from torchembed.ops.side_by_side import after_reserved, side_by_side


def reserved(num_reserved: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """``[3, num_reserved + 4]``, whose first columns hold nothing, and the others of it."""
    whole = normal(3, num_reserved + 4, seed=8, dtype=dtype)
    whole[:, :num_reserved] = torch.nan
    whole.requires_grad_()
    return whole, after_reserved(whole, num_reserved)


def gradients_of(result: Tensor, *leaves: Tensor) -> list[Tensor]:
    coefficients = normal(*result.shape, seed=9, dtype=result.dtype)
    return list(torch.autograd.grad((result * coefficients).sum(), leaves))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("widths", [(2,), (2, 0, 3)])
def test_what_is_reserved_is_filled(dtype: torch.dtype, widths: tuple[int, ...]) -> None:
    whole, values = reserved(sum(widths), dtype)
    leading = [normal(3, width, seed=k, dtype=dtype) for k, width in enumerate(widths)]
    leading = [part.requires_grad_() for part in leading]
    squares = values.square().sum()  # what was saved of them before is used later
    result = side_by_side(*leading, values)
    assert result.data_ptr() == whole.data_ptr()
    expected = torch.cat([*leading, values.detach()], dim=1)
    assert_same_bits(result.detach(), expected)
    *of_leading, of_whole = gradients_of(result, *leading, whole)
    for found, other in zip(of_leading, gradients_of(expected, *leading), strict=True):
        assert_same_bits(found, other)
    coefficients = normal(*result.shape, seed=9, dtype=dtype)
    assert_same_bits(of_whole[:, sum(widths) :], coefficients[:, sum(widths) :])
    (of_squares,) = torch.autograd.grad(squares, whole)
    assert_same_bits(of_squares[:, sum(widths) :], 2 * values.detach())


def test_a_second_one_is_a_copy() -> None:
    _, values = reserved(2)
    first = side_by_side(normal(3, 2, seed=1), values)
    before = first.detach().clone()
    second = side_by_side(normal(3, 2, seed=2), values)
    assert_same_bits(second, torch.cat([normal(3, 2, seed=2), values], dim=1))
    assert_same_bits(first.detach(), before)


@pytest.mark.parametrize(
    "leading",
    [normal(3, 1, seed=1), normal(3, 2, seed=1, dtype=torch.float64), normal(3, 5, seed=1)],
    ids=["narrower", "another dtype", "wider"],
)
def test_what_does_not_fit_is_concatenated(leading: Tensor) -> None:
    whole, values = reserved(2)
    assert_same_bits(side_by_side(leading, values), torch.cat([leading, values], dim=1))
    assert whole[:, :2].isnan().all()
    assert_same_bits(side_by_side(values), values)
    assert_same_bits(side_by_side(values, leading), torch.cat([values, leading], dim=1))


def test_none_reserved() -> None:
    whole = normal(3, 4, seed=1)
    assert after_reserved(whole, 0) is whole


def test_second_derivatives() -> None:
    leading = normal(3, 2, seed=1, dtype=torch.float64)
    whole = normal(3, 6, seed=2, dtype=torch.float64)

    def squares(leading: Tensor, values: Tensor) -> Tensor:
        whole = torch.cat([torch.zeros_like(leading), values], dim=1)
        return side_by_side(leading, after_reserved(whole, 2)).square()

    leaves = leading.requires_grad_(), whole[:, 2:].clone().requires_grad_()
    assert torch.autograd.gradcheck(squares, leaves)
    assert torch.autograd.gradgradcheck(squares, leaves)


def test_it_compiles() -> None:
    compiled = compiled_once(lambda leading, whole: side_by_side(leading, after_reserved(whole, 2)))
    for num_samples in (3, 5):
        leading, whole = normal(num_samples, 2, seed=2), normal(num_samples, 6, seed=1)
        assert_same_bits(compiled(leading, whole), torch.cat([leading, whole[:, 2:]], dim=1))
