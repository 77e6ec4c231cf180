"""The example in the docstring of each kernel of the dense part, and 64-bit addresses."""

import math

import pytest
import torch
import triton.language as tl
from torch import Tensor

from tests.support.tolerance import relative_error
from tests.support.values import normal
from torchembed.core.types import OptimizerKind
from torchembed.core.update_records import DenseUpdate
from torchembed.triton_kernels import (
    binary_cross_entropy,
    column_sums,
    dense_update,
    linear,
    low_rank_cross,
    row_blocks,
)

# A float32 product comes from torch; only 16-bit ones are made in the kernel.
DTYPES = (torch.float32, torch.bfloat16)


def full(device: torch.device, dtype: torch.dtype, *values: float) -> list[Tensor]:
    return [torch.full((1, 1), value, device=device, dtype=dtype) for value in values]


@pytest.mark.parametrize("dtype", DTYPES)
def test_low_rank_cross_forward(dtype: torch.dtype, device: torch.device, addresses: str) -> None:
    x0, h, u, x = full(device, dtype, 2, 3, 1, 7)
    out, z = low_rank_cross.launch_low_rank_cross_forward(x0, h, u, u[0], x)
    assert (z.item(), out.item()) == (4, 15)
    out, _ = low_rank_cross.launch_low_rank_cross_forward(x0, h, u, u[0], x0)
    assert out.item() == 10


@pytest.mark.parametrize("dtype", DTYPES)
def test_low_rank_cross_backward(dtype: torch.dtype, device: torch.device, addresses: str) -> None:
    grad, grad_h, v, x0 = full(device, dtype, 3, 2, 1, 4)
    bias = torch.empty(1, device=device, dtype=dtype)
    grad_x, grad_z = low_rank_cross.launch_low_rank_cross_backward(grad, grad_h, v, x0, bias)
    assert (grad_x.item(), grad_z.item(), bias.item()) == (5, 20, 20)


@pytest.mark.parametrize("dtype", DTYPES)
def test_low_rank_cross_input_backward(
    dtype: torch.dtype, device: torch.device, addresses: str
) -> None:
    grad_h, v, first, second, z_first, z_second = full(device, dtype, 2, 1, 3, 5, 4, 6)
    (grad_x0,) = low_rank_cross.launch_low_rank_cross_input_backward(
        grad_h, v, [first, second], [z_first, z_second], [1]
    )
    assert grad_x0.item() == 47


@pytest.mark.parametrize(
    ("rectify", "product", "total"), [(False, [-3.0, 8.0], 5.0), (True, [0.0, 4.0], 4.0)]
)
def test_multiply_and_sum(
    rectify: bool, product: list[float], total: float, device: torch.device, addresses: str
) -> None:
    matrix, factor = torch.tensor([[[3.0], [4.0]], [[-1.0], [2.0]]], device=device)
    found, sums = torch.empty_like(matrix), torch.empty(1, device=device)
    column_sums.multiply_and_sum(matrix, factor, found, sums, rectify=rectify)
    assert found.flatten().tolist() == product
    assert sums.item() == total
    column_sums.multiply_and_sum(matrix, None, None, sums)
    assert sums.item() == 7


def test_linear_to_one(device: torch.device, addresses: str) -> None:
    x, weight, bias = (
        torch.tensor(values, device=device) for values in ([[2.0, 3.0]], [[4.0, 5.0]], [1.0])
    )
    assert linear.launch_linear_to_one_forward(x, weight, bias).tolist() == [[24]]
    grad, x, weight = (
        torch.tensor(values, device=device) for values in ([[3.0], [1.0]], [[2.0], [5.0]], [[4.0]])
    )
    total = torch.empty_like(bias)
    grad_x = linear.launch_linear_to_one_backward(
        grad, x, weight, weight_total := weight * 0, total
    )
    assert grad_x.tolist() == [[12], [4]]
    assert (weight_total.item(), total.item()) == (11, 4)


def test_sum_partials(device: torch.device) -> None:
    total = torch.empty(2, device=device)
    column_sums.sum_partials(torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device), total)
    assert total.tolist() == [4, 6]


def test_dense_update(device: torch.device, addresses: str) -> None:
    weight, grad, lr = torch.tensor([[10.0], [3.0], [2.0]], device=device)
    scalars = (lr, None, None, None, [0, 1], int(OptimizerKind.SGD), 0.0, 0.0, 0.0, 0.0)
    dense_update.launch_dense_update(DenseUpdate(weight, None, None, None, grad, *scalars))
    assert weight.item() == 4


def test_the_scales_of_adam(device: torch.device) -> None:
    scales, one = torch.empty(2, device=device), torch.ones(1, device=device)
    dense_update._dense_update_adam_scales_kernel[(1,)](
        scales, one, one, LOG_BETA1=-math.inf, LOG_BETA2=math.log(0.75)
    )
    assert scales.tolist() == [1.0, 0.5]


def test_binary_cross_entropy(device: torch.device, addresses: str) -> None:
    logits, labels = torch.zeros(2, device=device), torch.tensor([0.0, 1.0], device=device)
    loss = binary_cross_entropy.launch_binary_cross_entropy_forward(logits, labels)
    # The series' first term is a rounded quotient, to which a rounded sum adds the others: one part
    # in 26, of fewer than 26 roundings.
    assert loss.item() == pytest.approx(math.log(2), rel=relative_error(3), abs=0)
    one = torch.ones((), device=device)
    grad = binary_cross_entropy.launch_binary_cross_entropy_backward(one, logits, labels)
    assert grad.tolist() == [0.25, -0.25]


def test_wide_addresses_change_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x0, grad, z = (
        normal(140, 150, seed=seed, dtype=torch.bfloat16, device=device) for seed in range(3)
    )
    h = normal(140, 20, seed=3, dtype=torch.bfloat16, device=device)
    v = normal(20, 150, seed=4, dtype=torch.bfloat16, device=device)
    bias = torch.empty(150, dtype=torch.bfloat16, device=device)

    def results() -> list[Tensor]:
        u = v.t().contiguous()
        return [
            *low_rank_cross.launch_low_rank_cross_forward(x0, h, u, x0[0], z),
            *low_rank_cross.launch_low_rank_cross_backward(grad, h, v, x0, bias),
            bias.clone(),
            *low_rank_cross.launch_low_rank_cross_input_backward(h, v, [grad], [z], [50, 100]),
            low_rank_cross.launch_low_rank_cross_scale(grad, x0, bias),
        ]

    narrow = results()
    monkeypatch.setattr(row_blocks, "NARROW_LIMIT", 0)
    assert row_blocks.index_type(x0) == tl.int64
    for wide, same in zip(results(), narrow, strict=True):
        assert torch.equal(wide, same)
