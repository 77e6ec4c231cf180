"""The public function ``low_rank_cross_network``."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.autograd.first_order import first_order
from torchembed.autograd.weight_gradients import keep_parameters, product_gradient
from torchembed.core import checks
from torchembed.core.function_context import FunctionContext
from torchembed.ops.cross.schema import (
    low_rank_cross_backward_op,
    low_rank_cross_forward_op,
    low_rank_cross_input_backward_op,
    low_rank_cross_scale_op,
)
from torchembed.ops.linear.bias_gradient import bias_gradient, empty_sums
from torchembed.ops.side_by_side import joined_in_place, side_by_side


class _LowRankCrossNetwork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionContext, num_parts: int, *tensors: Tensor) -> Tensor:
        parts = tensors[:num_parts]
        x0 = parts[0].contiguous() if num_parts == 1 else torch.cat(parts, dim=1)
        keep_parameters(ctx, *tensors[num_parts:])
        parameters = [parameter.to(x0.dtype) for parameter in tensors[num_parts:]]
        num_layers = len(parameters) // 3
        xs, hs, zs = [x0], [], []
        for layer in range(num_layers):
            v, u, bias = parameters[layer::num_layers]
            h = xs[layer] @ v.t()
            x, z = low_rank_cross_forward_op(x0, h, u, bias, xs[layer])
            xs.append(x)
            hs.append(h)
            zs.append(z)
        ctx.save_for_backward(*xs[:-1], *hs, *zs, *parameters)
        ctx.num_layers, ctx.widths = num_layers, [part.shape[1] for part in parts]
        return xs[-1]

    @staticmethod
    @first_order("torchembed's low-rank cross network", "torch's own operations")
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        num_layers, saved = ctx.num_layers, ctx.saved_tensors
        xs, hs, zs, v, u, bias = (
            saved[part * num_layers : (part + 1) * num_layers] for part in range(6)
        )
        of_v, of_u, of_bias = (
            ctx.parameters[part * num_layers : (part + 1) * num_layers] for part in range(3)
        )
        is_needed = ctx.needs_input_grad[1 + len(ctx.widths) :]
        grads, grads_v, grads_u, grads_bias = [], [], [], []
        # Below the last layer a product's kernel adds up the rows of its tiles. Those of float32
        # have fewer rows than a partial sum, so their kernel adds up everything itself.
        by_tiles = grad.dtype is not torch.float32
        sums = [
            empty_sums(b, of_b, grad.shape[0], has_partials=by_tiles or layer == num_layers - 1)
            for layer, (b, of_b) in enumerate(zip(bias, of_bias, strict=True))
        ]
        grad, grad_parts = grad.contiguous(), []
        next_grad_z = low_rank_cross_scale_op(grad, xs[0], sums[-1])
        for layer in reversed(range(num_layers)):
            grads.insert(0, grad)
            grad_z = next_grad_z
            grad_h = grad_z @ u[layer]
            grad_bias, grad_u, grad_v = None, None, None
            if is_needed[2 * num_layers + layer]:
                grad_bias = bias_gradient(bias[layer], of_bias[layer], sums[layer])
            if is_needed[num_layers + layer]:
                grad_u = product_gradient(of_u[layer], grad_z, hs[layer])
            if layer:
                grad, next_grad_z = low_rank_cross_backward_op(
                    grad, grad_h, v[layer], xs[0], sums[layer - 1]
                )
            else:
                grad_parts = low_rank_cross_input_backward_op(
                    grad_h, v[0], grads, list(zs), ctx.widths
                )
            # After the last use of v: its optimizer may update it as soon as the gradient is there.
            if is_needed[layer]:
                grad_v = product_gradient(of_v[layer], grad_h, xs[layer])
            grads_bias.insert(0, grad_bias)
            grads_u.insert(0, grad_u)
            grads_v.insert(0, grad_v)
        return None, *grad_parts, *grads_v, *grads_u, *grads_bias


def low_rank_cross_network(
    x0: Tensor | Sequence[Tensor],
    v: Sequence[Tensor],
    u: Sequence[Tensor],
    bias: Sequence[Tensor],
) -> Tensor:
    """Low-rank cross layers of DCN-V2: ``x[l+1] = x0 * (u[l] @ (v[l] @ x[l]) + bias[l]) + x[l]``.

    R. Wang et al., "DCN V2: Improved Deep & Cross Network", WWW 2021, equation 2. Everything after
    the second product of a layer is the product's epilogue, in float32, forward and backward. The
    gradients of ``x0`` from all layers are added up once, in the last pass of backward. The sums
    over samples for ``bias`` are float32, in an order that the shape fixes: deterministic. Never
    synchronizes. Under ``torch.autocast`` everything is cast. The gradient of a parameter has the
    parameter's own dtype; on a GPU, that of a float32 one is not rounded to autocast's on the way.
    Gradients of ``v`` and ``u`` may be deferred
    (:class:`~torchembed.autograd.weight_gradients.DeferredWeightGradients`).

    Args:
        x0: ``[B, N]``, float32, float16 or bfloat16; or parts of it, ``[B, N1]``, ``[B, N2]`` and
            so on, side by side: their gradients come out apart, without a copy. Where the last of
            them has ``reserved_columns`` for the others, it is not copied in forward either, see
            :func:`~torchembed.ops.side_by_side.side_by_side`.
        v: ``[rank, N]`` for each layer, of the dtype of ``x0``.
        u: ``[N, rank]`` for each layer, likewise.
        bias: ``[N]`` for each layer, likewise.

    Returns:
        ``[B, N]``; ``x0`` itself for no layers.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit.
    """
    parts = [x0] if isinstance(x0, Tensor) else list(x0)
    if not parts:
        raise ValueError("x0 must be a tensor or one part or more, got none")
    if not len(v) == len(u) == len(bias):
        raise ValueError(
            f"v, u and bias must hold one tensor a layer, got {len(v)}, {len(u)} and {len(bias)}"
        )
    parameters = [*v, *u, *bias]
    device = parts[0].device.type
    dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
    is_cast = torch.is_autocast_enabled(device)
    if is_cast:
        dtype = torch.get_autocast_dtype(device)
    parts = [part.to(dtype) for part in parts]
    _check(parts, parameters, is_cast=is_cast)
    if not parameters:
        return side_by_side(*parts)
    joined = joined_in_place(parts)
    if joined is not None:
        parts = [joined]
    contiguous = [parameter.contiguous() for parameter in parameters]
    return _LowRankCrossNetwork.apply(len(parts), *parts, *contiguous)


def _check(parts: list[Tensor], parameters: list[Tensor], *, is_cast: bool) -> None:
    first = parts[0]
    checks.check_float("x0", first)
    for part in parts:
        checks.check_dim("x0", part, 2)
        if part.shape[0] != first.shape[0]:
            raise ValueError(
                f"x0 must have parts of one batch size, got {first.shape[0]} and {part.shape[0]}"
            )
        checks.check_same_device("x0", first, part=part)
    num_layers, width = len(parameters) // 3, sum(part.shape[1] for part in parts)
    for position, parameter in enumerate(parameters):
        kind, layer = divmod(position, num_layers)
        name = f"{('v', 'u', 'bias')[kind]}[{layer}]"
        rank = parameters[layer].shape[0]
        expected = ((rank, width), (width, rank), (width,))[kind]
        if is_cast:
            checks.check_float(name, parameter)
        else:
            checks.check_dtype(
                name, parameter, (first.dtype,), "cast it to x0's, or use torch.autocast"
            )
        if tuple(parameter.shape) != expected:
            raise ValueError(f"{name} must have shape {expected}, got {tuple(parameter.shape)}")
        checks.check_same_device("x0", first, **{name: parameter})
