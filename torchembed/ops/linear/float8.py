"""The public function ``float8_linear``."""

import torch
from torch import Tensor

from torchembed.autograd.first_order import first_order
from torchembed.autograd.weight_gradients import (
    gradient_memory,
    keep_parameters,
    product_gradient,
)
from torchembed.core import checks
from torchembed.core.function_context import FunctionContext
from torchembed.ops.linear.function import autocast_dtype, check_input, check_layer
from torchembed.ops.linear.schema import sum_rows_op
from torchembed.ops.row_codec import scaled_rows

UNIT = 16
"""Divisor of both widths of a layer: 16 bytes of 8-bit numbers."""
_LEAST_CAPABILITY = (9, 0)


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionContext, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        keep_parameters(ctx, weight, bias)
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        ctx.save_for_backward(x, weight, bias)
        return _product(x, weight, bias)

    @staticmethod
    @first_order("torchembed's linear layer in float8", "torch.nn.functional.linear")
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        of_weight, of_bias = ctx.parameters
        grad_x, grad_weight, grad_bias = None, None, None
        grad = grad.contiguous()
        if ctx.needs_input_grad[0]:
            grad_x = _product(grad, weight.t())
        if ctx.needs_input_grad[2]:
            grad_bias = gradient_memory(bias, of_bias)
            sum_rows_op(grad, grad_bias)
        if ctx.needs_input_grad[1]:
            grad_weight = product_gradient(of_weight, grad, x)
        return grad_x, grad_weight, grad_bias


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """``left @ right.T + bias`` of ``left [M, K]`` and ``right [N, K]``, in the dtype of ``left``.

    Both are rounded to e4m3 with a scale for each row; the result is rounded to bfloat16, as
    ``bias`` is.
    """
    bias = None if bias is None else bias.to(torch.bfloat16)
    (a, of_a), (b, of_b) = scaled_rows(left), scaled_rows(right)
    if left.is_cuda and left.shape[0]:
        product = torch._scaled_mm(  # type: ignore[reportPrivateImportUsage]
            a, b.t(), scale_a=of_a, scale_b=of_b.t(), bias=bias, out_dtype=torch.bfloat16
        )
    else:
        # The same numbers: scales are powers of two, so that no product with one is rounded.
        with torch.autocast(left.device.type, enabled=False):
            product = (a.float() * of_a) @ (b.float() * of_b).t()
        if bias is not None:
            product += bias
    return product.to(torch.bfloat16).to(left.dtype)


def _check_gpu(device: torch.device) -> None:
    found = torch.cuda.get_device_capability(device)
    if found < _LEAST_CAPABILITY:
        raise ValueError(
            "x must be on the CPU or a GPU of compute capability 9.0 or later for products in "
            f"float8, got {torch.cuda.get_device_name(device)} of {found[0]}.{found[1]}; use linear"
        )


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` with its product, and that of the gradient of ``x``, in float8.

    Rows of both factors of each product are rounded to e4m3 with a scale each
    (:func:`~torchembed.ops.row_codec.scaled_rows`), for the gradient of ``x`` the columns of
    ``weight``. The result is rounded to bfloat16, as ``bias`` is. The gradient of ``weight`` is a
    product of factors in the dtype of ``x``, as for :func:`~torchembed.ops.linear.linear`, and may
    be deferred. Scales stay on the device: never synchronizes. On the CPU the same factors are
    multiplied in float32. Under ``torch.autocast`` everything is cast.

    Args:
        x: ``[..., K]``, float32, float16 or bfloat16; K a multiple of 16.
        weight: ``[N, K]``, of the dtype of ``x``; N a multiple of 16.
        bias: ``[N]``, likewise.

    Returns:
        ``[..., N]``.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit, as a GPU without
            such products.
    """
    dtype = autocast_dtype(x)
    x = x if dtype is None else x.to(dtype)
    check_layer("weight", weight, "bias", bias, is_cast=dtype is not None)
    if weight.shape[0] % UNIT or weight.shape[1] % UNIT or not weight.numel():
        raise ValueError(
            f"weight must have widths that are multiples of {UNIT} for products in float8, got "
            f"{tuple(weight.shape)}; use linear"
        )
    check_input(x, "weight", weight, is_cast=dtype is not None)
    checks.check_same_device("x", x, weight=weight, bias=bias)
    if x.is_cuda and not torch.compiler.is_compiling():
        _check_gpu(x.device)
    out = _Float8Linear.apply(x.reshape(-1, weight.shape[1]), weight, bias)
    return out.view(*x.shape[:-1], weight.shape[0])
