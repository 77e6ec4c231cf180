"""The library's kernel of rectified layers' backward on a GPU, against the specification."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.repeats import assert_repeats
from tests.support.tolerance import assert_as_near, assert_follows, assert_same_bits
from tests.support.values import normal
from torchembed.autograd.weight_gradients import DeferredWeightGradients
from torchembed.core.dispatch import CudaKernel, picked_kernels
from torchembed.ops.linear import cuda, linear_relu_stack

pytestmark = pytest.mark.gpu

SHAPES = {
    "smallest": (1, 8, 8),
    "odd": (77, 200, 40),
    "one row less than a tile": (127, 72, 64),
    "one row more": (129, 512, 256),
    "few columns": (129, 8, 512),
    "less than a step and more": (300, 136, 520 - 64),
    "shallow": (512, 512, 8),
    "some row blocks": (512, 1024, 512),
    "many row blocks": (8192, 72, 16),
    "wide": (8192, 1024, 512),
    "as published": (8192, 512, 256),
}
"""Rows, columns and depth."""
DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture
def kernel(device: torch.device) -> CudaKernel:
    found = cuda.input_backward_kernel()
    if found is None:
        pytest.skip("the C++ library was built without CUDA")
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("the kernel is for GPUs of compute capability 9.0")
    return found


def formula(grad: Tensor, weight: Tensor, output: Tensor) -> Tensor:
    return torch.where(output > 0, grad @ weight, 0)


def inputs(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """grad, weight, and an output with zeros of both signs."""
    num_rows, num_columns, depth = shape
    grad = normal(num_rows, depth, seed=0, dtype=dtype, device=device)
    weight = normal(depth, num_columns, seed=1, dtype=dtype, device=device)
    output = normal(num_rows, num_columns, seed=2, dtype=dtype, device=device)
    return [grad, weight, torch.where(output < -1, -0.0, output.relu())]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_follows_its_formula(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, kernel: CudaKernel
) -> None:
    num_rows, num_columns, depth = shape
    tensors = inputs(shape, dtype, device)
    num_blocks = -(-num_rows // 128)
    blocks = torch.full((num_blocks, num_columns), torch.nan, device=device)
    total, rounded = (
        torch.full((num_columns,), torch.nan, device=device, dtype=each)
        for each in (torch.float32, dtype)
    )
    for sums in blocks, total, rounded:
        assert_repeats(lambda sums=sums: (kernel.launch(*tensors, sums), sums.clone()))
    found = kernel.launch(*tensors, blocks)
    assert found.dtype == dtype
    assert_follows(found, lambda wide: formula(*(tensor.to(wide) for tensor in tensors)))
    for sums in total, rounded:
        assert_same_bits(kernel.launch(*tensors, sums), found)

    grad, weight, output = (tensor.double() for tensor in tensors)
    terms, sizes = formula(grad, weight, output), formula(grad.abs(), weight.abs(), output)
    for sums, length in (blocks, 128), (total[None], num_rows):
        # Each of so many additions is off by an eps of all that may have been added, at most.
        bound = (depth + length + 1) * torch.finfo(torch.float32).eps
        for of_block, of_rows, size in zip(
            sums, terms.split(length), sizes.split(length), strict=True
        ):
            assert ((of_block - of_rows.sum(0)).abs() <= bound * size.sum(0)).all()
    assert_same_bits(rounded, total.to(dtype))


def test_the_operation_picks_it(device: torch.device, kernel: CudaKernel) -> None:
    name = "linear_relu_input_backward"
    (pick,) = [pick for pick in picked_kernels if (pick.op, pick.key) == (name, "CUDA")]
    assert pick.reason.endswith(f"the C++ library takes {kernel.covers}")
    for shape in SHAPES.values():
        tensors = inputs(shape, torch.bfloat16, device)
        sums = torch.empty(2, shape[1], device=device)
        found = torch.ops.torchembed.linear_relu_input_backward(*tensors, sums[0])
        assert_same_bits(found, kernel.launch(*tensors, sums[1]))
        assert_same_bits(sums[0], sums[1])


def test_what_it_leaves_to_triton(device: torch.device, kernel: CudaKernel) -> None:
    half = torch.bfloat16

    def launch(num_rows: int, num_columns: int, depth: int, dtype: torch.dtype) -> object:
        tensors = inputs((num_rows, num_columns, depth), dtype, device)
        return kernel.launch(*tensors, torch.empty(num_columns, device=device))

    assert launch(8, 8, 8, half) is not NotImplemented
    for sizes in (0, 8, 8), (8, 0, 8), (8, 8, 0), (8, 12, 8), (8, 8, 12), (8, 8, 520):
        assert launch(*sizes, half) is NotImplemented
    assert launch(8, 8, 8, torch.float32) is NotImplemented
    sums = torch.empty(16, device=device)
    grad, weight, output = inputs((8, 16, 8), half, device)
    assert kernel.launch(grad, weight, output, sums) is not NotImplemented
    assert kernel.launch(grad, weight.t().contiguous().t(), output, sums) is NotImplemented
    shifted = torch.zeros(1 + output.numel(), device=device, dtype=half)[1:].view(8, 16)
    assert kernel.launch(grad, weight, shifted, sums) is NotImplemented


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 300, 2050])
def test_stacks_follow_their_formula(
    num_rows: int, dtype: torch.dtype, device: torch.device, kernel: CudaKernel
) -> None:
    widths = (24, 512, 256, 72)
    sizes = [(num_rows, widths[0]), *zip(widths[1:], widths[:-1], strict=True)]
    sizes += [(width,) for width in widths[1:]]
    tensors = [
        normal(*size, seed=seed, dtype=dtype, device=device) / math.sqrt(size[-1])
        for seed, size in enumerate(sizes)
    ]
    grad = normal(num_rows, widths[-1], seed=9, dtype=dtype, device=device)

    def layers(x: Tensor, *parameters: Tensor) -> Tensor:
        for weight, bias in zip(parameters[:3], parameters[3:], strict=True):
            x = F.relu(F.linear(x, weight, bias))
        return x

    def stack(x: Tensor, *parameters: Tensor) -> Tensor:
        return linear_relu_stack(x, parameters[:3], parameters[3:])

    def results(function: Callable[..., Tensor], wide: torch.dtype) -> list[Tensor]:
        leaves = [tensor.to(wide, copy=True).requires_grad_() for tensor in tensors]
        output = function(*leaves)
        return [output, *torch.autograd.grad(output, leaves, grad.to(wide))]

    found = results(stack, dtype)
    exact, eager = results(layers, torch.float64), results(layers, dtype)
    for actual, low, true in zip(found, eager, exact, strict=True):
        assert_as_near(actual, low, true)
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    with DeferredWeightGradients():
        stack(*leaves).backward(grad)
    *others, last_bias = leaves
    for leaf, same in zip(others, found[1:-1], strict=True):
        assert_same_bits(leaf.grad, same)
    # Its parts may be added up in another order.
    assert_as_near(last_bias.grad, eager[-1], exact[-1])
