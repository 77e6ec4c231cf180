"""The library's kernels of cross layers on a GPU, against the specification."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.repeats import assert_repeats
from tests.support.tolerance import assert_follows
from tests.support.values import normal
from torchembed.ops.cross import cuda

pytestmark = pytest.mark.gpu

SHAPES = {
    "smallest": (1, 8, 8),
    "one tile": (128, 64, 64),
    "odd": (77, 200, 40),
    "less than a step and more": (300, 136, 520 - 64),
    "several row blocks": (1000, 1000, 256),
    "as published": (2050, 3456, 512),
    "many row blocks": (20_000, 128, 16),
}
DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def right_gpu(device: torch.device) -> None:
    if cuda.forward_kernel() is None:
        pytest.skip("the C++ library was built without CUDA")
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("the kernels are for GPUs of compute capability 9.0")


def cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list):
        return [cast(each, dtype) for each in value]
    return value.cpu().to(dtype) if isinstance(value, Tensor) else value


def check(kernel: Any, formula: Callable[..., Sequence[Tensor]], *arguments: Any) -> None:
    """All results follow the formula, and come again bit by bit."""
    assert kernel is not None
    assert_repeats(lambda: tuple(kernel.launch(*arguments)))
    for number, tensor in enumerate(kernel.launch(*arguments)):

        def expected(dtype: torch.dtype, number: int = number) -> Tensor:
            return formula(*cast(list(arguments), dtype))[number]

        assert_follows(tensor, expected)


def forward(x0: Tensor, h: Tensor, u: Tensor, bias: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    z = h @ u.t() + bias
    return x0 * z + x, z


def backward(
    grad: Tensor, grad_h: Tensor, v: Tensor, x0: Tensor, _: Tensor
) -> tuple[Tensor, Tensor]:
    grad_x = grad + grad_h @ v
    return grad_x, grad_x * x0


def input_backward(
    grad_h: Tensor, v: Tensor, grads: list[Tensor], z: list[Tensor], widths: list[int]
) -> Sequence[Tensor]:
    total = grad_h @ v + grads[0]
    for grad, factor in zip(grads, z, strict=True):
        total = total + grad * factor
    return total.split(widths, dim=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_forward(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    num_rows, num_columns, depth = shape
    x0, x, h, u, bias = (
        normal(*size, seed=seed, dtype=dtype, device=device)
        for seed, size in enumerate(
            [(num_rows, num_columns)] * 2
            + [(num_rows, depth), (num_columns, depth), (num_columns,)]
        )
    )
    check(cuda.forward_kernel(), forward, x0, h, u, bias, x)
    check(cuda.forward_kernel(), forward, x0, h, u, bias, x0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_backward(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    num_rows, num_columns, depth = shape
    grad, x0, grad_h, v = (
        normal(*size, seed=seed, dtype=dtype, device=device)
        for seed, size in enumerate(
            [(num_rows, num_columns)] * 2 + [(num_rows, depth), (depth, num_columns)]
        )
    )
    kernel = cuda.backward_kernel()
    assert kernel is not None
    blocks = torch.full((-(-num_rows // 128), num_columns), 7.0, device=device)
    check(kernel, backward, grad, grad_h, v, x0, blocks)
    total = torch.full((num_columns,), 7.0, device=device)
    kernel.launch(grad, grad_h, v, x0, total)

    exact = cast([grad, grad_h, v, x0, blocks], torch.float64)
    terms, sizes = backward(*exact)[1], backward(*(tensor.abs() for tensor in exact))[1]
    for sums, length in (blocks, 128), (total[None], num_rows):
        # Each of so many additions is off by an eps of all that may have been added, at most.
        bound = (depth + length + 1) * torch.finfo(torch.float32).eps
        for found, of_rows, size in zip(
            sums, terms.split(length), sizes.split(length), strict=True
        ):
            error = (found.cpu().double() - of_rows.sum(0)).abs()
            assert (error <= bound * size.sum(0)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_layers", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_input_backward(
    shape: tuple[int, int, int], num_layers: int, dtype: torch.dtype, device: torch.device
) -> None:
    num_rows, num_columns, depth = shape
    grad_h = normal(num_rows, depth, seed=0, dtype=dtype, device=device)
    v = normal(depth, num_columns, seed=1, dtype=dtype, device=device)
    matrices = [
        normal(num_rows, num_columns, seed=2 + seed, dtype=dtype, device=device)
        for seed in range(2 * num_layers)
    ]
    grads, z = matrices[:num_layers], matrices[num_layers:]
    starts = [start for start in (64, 192) if start < num_columns]
    ends = [0, *starts, num_columns]
    for widths in [num_columns], [b - a for a, b in itertools.pairwise(ends)]:
        check(cuda.input_backward_kernel(), input_backward, grad_h, v, grads, z, widths)


def test_what_it_leaves_to_triton(device: torch.device) -> None:
    kernel, inputs = cuda.forward_kernel(), cuda.input_backward_kernel()
    assert kernel is not None
    assert inputs is not None

    def call(num_rows: int, num_columns: int, depth: int, dtype: torch.dtype) -> Any:
        x0 = torch.zeros(num_rows, num_columns, device=device, dtype=dtype)
        h = torch.zeros(num_rows, depth, device=device, dtype=dtype)
        u = torch.zeros(num_columns, depth, device=device, dtype=dtype)
        return kernel.launch(x0, h, u, u[:, 0].contiguous(), x0)

    half = torch.bfloat16
    assert call(8, 8, 8, half) is not NotImplemented
    for sizes in (0, 8, 8), (8, 0, 8), (8, 12, 8), (8, 8, 12), (8, 8, 520):
        assert call(*sizes, half) is NotImplemented
    assert call(8, 8, 8, torch.float32) is NotImplemented
    x0, bias = torch.zeros(8, 8, device=device, dtype=half), torch.zeros(9, device=device)
    assert kernel.launch(x0, x0, x0, bias.to(half)[1:], x0) is NotImplemented
    grad = torch.zeros(8, 136, device=device, dtype=half)
    h, v = grad[:, :8].contiguous(), torch.zeros(8, 136, device=device, dtype=half)
    assert inputs.launch(h, v, [grad], [grad], [64, 72]) is not NotImplemented
    for widths in [72, 64], [], [136, 0]:
        assert inputs.launch(h, v, [grad], [grad], widths) is NotImplemented
    assert inputs.launch(h, v, [grad] * 5, [grad] * 5, [136]) is NotImplemented


def test_what_the_library_refuses(device: torch.device) -> None:
    ops = torch.ops.torchembed_native
    x = torch.zeros(8, 16, device=device, dtype=torch.bfloat16)
    square, bias = x[:, :8].contiguous(), x[0]
    sums = torch.zeros(1, 16, device=device)
    with pytest.raises(RuntimeError, match=r"x must have shape \(8, 16\)"):
        ops.low_rank_cross_forward(x, square, x.view(16, 8), bias, square, 0)
    with pytest.raises(RuntimeError, match=r"u must be BFloat16, got Half"):
        ops.low_rank_cross_forward(x, square, x.view(16, 8).half(), bias, x, 0)
    with pytest.raises(RuntimeError, match=r"must be bfloat16 or float16, got Float"):
        ops.low_rank_cross_forward(x, square.float(), x.view(16, 8), bias, x, 0)
    with pytest.raises(RuntimeError, match="bias must be contiguous, on 4 bytes, with an element"):
        ops.low_rank_cross_forward(x, square, x.view(16, 8), bias[:8], x, 0)
    with pytest.raises(RuntimeError, match=r"sums must be contiguous, float32, of shape \(1, 16\)"):
        ops.low_rank_cross_backward(x, square, x, x, sums[0], 0)
    with pytest.raises(RuntimeError, match="widths must be multiples of 64, got 8"):
        ops.low_rank_cross_input_backward(square, x, [x], [x], [8, 8], 0)
    with pytest.raises(RuntimeError, match="widths must add up to 16, got 8"):
        ops.low_rank_cross_input_backward(square, x, [x], [x], [8], 0)
    with pytest.raises(RuntimeError, match="of as many layers, up to 4, got 1 and 0"):
        ops.low_rank_cross_input_backward(square, x, [x], [], [16], 0)
