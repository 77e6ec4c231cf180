"""The public functions ``cross_epilogue`` and ``full_rank_cross``."""

import torch
from torch import Tensor

from torchembed.autograd.first_order import first_order
from torchembed.core.function_context import FunctionContext
from torchembed.ops.cross.schema import cross_epilogue_backward_op, cross_epilogue_forward_op
from torchembed.ops.linear import linear


class _CrossEpilogue(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionContext, x0: Tensor, z: Tensor, bias: Tensor, x: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x0, z, bias)
        ctx.x_dtype = None if x is None else x.dtype
        return cross_epilogue_forward_op(x0, z, bias, x0 if x is None else x)

    @staticmethod
    @first_order("torchembed's cross epilogue", "x0 * (z + bias) + x")
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x0, grad_z, grad_bias = cross_epilogue_backward_op(
            grad.contiguous(), *ctx.saved_tensors, ctx.x_dtype is None
        )
        grad_x = None if ctx.x_dtype is None else grad.to(ctx.x_dtype)
        return grad_x0, grad_z, grad_bias, grad_x


def cross_epilogue(x0: Tensor, z: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """Epilogue of a cross layer, after its matrix products: ``x0 * (z + bias) + x``.

    The Triton kernels read each of ``x0``, ``z`` and ``x`` once forward, and ``x0``, ``z`` and the
    gradient once backward; each result is written once. Arithmetic is float32, and so are the sums
    over the batch for the gradient of ``bias``, in an order that the shape fixes: deterministic.
    Never synchronizes.

    Worked example: ``x0 = [[2, 3]]``, ``z = [[4, 5]]``, ``bias = [1, -1]``, ``x = [[7, 8]]`` give
    ``[[17, 20]]``.

    Args:
        x0: ``[B, N]``, float32, float16 or bfloat16: the input of the first layer.
        z: ``[B, N]``: the matrix product of this layer.
        bias: ``[N]``.
        x: ``[B, N]``: the input of this layer; may be ``x0`` itself.

    Returns:
        ``[B, N]``, in the type that torch promotes ``x0``, ``z`` and ``x`` to.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit.
    """
    # The first layer's x is x0: one gradient for both saves a pass over them, and torch.compile
    # takes no tensor twice.
    return _CrossEpilogue.apply(
        x0.contiguous(),
        z.contiguous(),
        bias.contiguous(),
        None if x is x0 else x.contiguous(),
    )


def full_rank_cross(x0: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """One full-rank cross layer of DCN-V2: ``x0 * (weight @ x + bias) + x`` for each sample.

    R. Wang et al., "DCN V2: Improved Deep & Cross Network", WWW 2021, equation 1.

    Args:
        x0: ``[B, N]``, floating: the input of the first layer.
        x: ``[B, N]``: the input of this layer.
        weight: ``[N, N]``.
        bias: ``[N]``.

    Returns:
        ``[B, N]``.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit.
    """
    return cross_epilogue(x0, linear(x, weight), bias, x)
