"""The public functions ``linear`` and ``linear_relu``."""

from typing import Any

import torch
from torch import Tensor

from torchembed.core import checks
from torchembed.core.first_order import first_order
from torchembed.ops.linear.bias_gradient import SUMMED_AT_ONCE, bias_gradient, empty_sums
from torchembed.ops.linear.schema import (
    linear_relu_backward_op,
    linear_to_one_backward_op,
    linear_to_one_forward_op,
    sum_rows_op,
)
from torchembed.ops.weight_gradients import gradient_memory, keep_parameters, weight_gradient


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
        if bias is None:
            output = x @ weight.t()
        elif relu:
            # On a GPU the matrix product's own epilogue adds and rectifies.
            output = torch.ops.aten._addmm_activation(bias, x, weight.t())
        else:
            output = torch.addmm(bias, x, weight.t())
        ctx.save_for_backward(x, weight, bias, output if relu else None)
        keep_parameters(ctx, weight, bias)
        return output

    @staticmethod
    @first_order("torchembed's linear layer", "torch.nn.functional.linear")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, output = ctx.saved_tensors
        of_weight, of_bias = ctx.parameters
        grad_x, grad_weight, grad_bias, sums = None, None, None, None
        # Rows that are apart, as those of a concatenation's gradient, need no copy.
        grad = grad if grad.stride(1) == 1 else grad.contiguous()
        if output is not None:
            num_rows = grad.shape[0]
            sums = empty_sums(bias, of_bias, num_rows, adds_partials=num_rows > SUMMED_AT_ONCE)
            grad = linear_relu_backward_op(grad, output, sums)
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight
        if output is None and ctx.needs_input_grad[2]:
            sums = gradient_memory(bias, of_bias)
            sum_rows_op(grad, sums)
        if sums is not None and ctx.needs_input_grad[2]:
            grad_bias = bias_gradient(bias, of_bias, sums)
        if ctx.needs_input_grad[1]:
            grad_weight = weight_gradient(of_weight, lambda out: torch.mm(grad.t(), x, out=out))
        return grad_x, grad_weight, grad_bias, None


class _LinearToOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        keep_parameters(ctx, weight, bias)
        return linear_to_one_forward_op(x, weight, bias)

    @staticmethod
    @first_order("torchembed's linear layer", "torch.nn.functional.linear")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        of_weight, of_bias = ctx.parameters
        grad_weight = gradient_memory(weight, of_weight)
        grad_bias = gradient_memory(bias, of_bias) if ctx.needs_input_grad[2] else None
        grad_x = linear_to_one_backward_op(grad.contiguous(), x, weight, grad_weight, grad_bias)
        return grad_x, grad_weight if ctx.needs_input_grad[1] else None, grad_bias


def _apply(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    checks.check_float("weight", weight)
    checks.check_dim("weight", weight, 2)
    if x.shape[-1:] != weight.shape[1:]:
        raise ValueError(
            f"x must be [..., {weight.shape[1]}] for a weight of shape {tuple(weight.shape)}, "
            f"got {tuple(x.shape)}"
        )
    for name, other in (("x", x), ("bias", bias)):
        if other is not None:
            advice = "cast one of them, or use torch.autocast"
            checks.check_dtype(name, other, (weight.dtype,), advice)
    if bias is not None:
        checks.check_dim("bias", bias, 1)
        checks.check_numel("bias", bias, weight.shape[0], "one for each row of weight")
    checks.check_same_device("x", x, weight=weight, bias=bias)
    rows = x.reshape(-1, weight.shape[1])
    if weight.shape[0] == 1 and not relu:
        out = _LinearToOne.apply(rows.contiguous(), weight.contiguous(), bias)
    else:
        out = _Linear.apply(rows, weight, bias, relu)
    return out.view(*x.shape[:-1], weight.shape[0])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, as ``torch.nn.functional.linear``.

    Backward computes the gradient of ``x`` first; those of the parameters go to where an optimizer
    wants them, and that of ``weight`` may be deferred
    (:class:`~torchembed.ops.weight_gradients.DeferredWeightGradients`), unless it has one row: then
    all are made in one pass.
    The sum over samples for ``bias`` is float32, in an order that the shape fixes. Never
    synchronizes. Under ``torch.autocast`` everything is cast.

    Args:
        x: ``[..., K]``, float32, float16 or bfloat16.
        weight: ``[N, K]``, of the dtype of ``x``.
        bias: ``[N]``, likewise.

    Returns:
        ``[..., N]``.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit.
    """
    return _apply(x, weight, bias, relu=False)


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``relu(x @ weight.T + bias)``: one matrix product with an epilogue.

    Backward masks the gradient and sums it for ``bias`` in one pass; the rest is as for
    :func:`linear`, and so are arguments, result and errors.
    """
    return _apply(x, weight, bias, relu=True)
