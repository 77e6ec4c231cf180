"""The public functions ``linear``, ``linear_relu`` and ``linear_relu_stack``."""

from collections.abc import Mapping, Sequence

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
from torchembed.ops.linear.bias_gradient import bias_gradient, empty_sums
from torchembed.ops.linear.schema import (
    linear_relu_backward_op,
    linear_relu_input_backward_op,
    linear_to_one_backward_op,
    linear_to_one_forward_op,
    sum_rows_op,
)

_ADVICE = "cast one of them, or use torch.autocast"


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionContext, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        keep_parameters(ctx, weight, bias)
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        ctx.save_for_backward(x, weight, bias)
        return x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())

    @staticmethod
    @first_order("torchembed's linear layer", "torch.nn.functional.linear")
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        of_weight, of_bias = ctx.parameters
        grad_x, grad_weight, grad_bias = None, None, None
        grad = _with_whole_rows(grad)
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight
        if ctx.needs_input_grad[2]:
            grad_bias = gradient_memory(bias, of_bias)
            sum_rows_op(grad, grad_bias)
        if ctx.needs_input_grad[1]:
            grad_weight = product_gradient(of_weight, grad, x)
        return grad_x, grad_weight, grad_bias


class _LinearReluStack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionContext, x: Tensor, *parameters: Tensor) -> Tensor:
        keep_parameters(ctx, *parameters)
        cast, xs = [parameter.to(x.dtype) for parameter in parameters], [x]
        for weight, bias in zip(cast[::2], cast[1::2], strict=True):
            # On a GPU the matrix product's own epilogue adds the bias and applies the ReLU.
            xs.append(torch.ops.aten._addmm_activation(bias, xs[-1], weight.t()))
        ctx.save_for_backward(*xs, *cast)
        return xs[-1]

    @staticmethod
    @first_order("torchembed's linear layer", "torch.nn.functional.linear")
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        num_layers, saved = len(ctx.parameters) // 2, ctx.saved_tensors
        xs, parameters = saved[: num_layers + 1], saved[num_layers + 1 :]
        weights, biases = parameters[::2], parameters[1::2]
        of_weights, of_biases = ctx.parameters[::2], ctx.parameters[1::2]
        is_needed = ctx.needs_input_grad
        # Layers below the lowest one that needs a gradient are not passed through.
        grads: list[Tensor | None] = [None] * len(is_needed)
        lowest = max(is_needed.index(True) - 1, 0) // 2
        sums = {
            layer: empty_sums(biases[layer], of_biases[layer], grad.shape[0])
            for layer in range(lowest, num_layers)
        }
        next_grad = linear_relu_backward_op(_with_whole_rows(grad), xs[-1], sums[num_layers - 1])
        for layer in reversed(range(lowest, num_layers)):
            grad = next_grad
            if layer > lowest:
                next_grad = linear_relu_input_backward_op(
                    grad, weights[layer], xs[layer], sums[layer - 1]
                )
            elif is_needed[0]:
                grads[0] = grad @ weights[0]
            if is_needed[2 + 2 * layer]:
                grads[2 + 2 * layer] = bias_gradient(biases[layer], of_biases[layer], sums[layer])
            # After the last use of a weight: its optimizer may update it as soon as the gradient is
            # there.
            if is_needed[1 + 2 * layer]:
                grads[1 + 2 * layer] = product_gradient(of_weights[layer], grad, xs[layer])
        return tuple(grads)


def _with_whole_rows(grad: Tensor) -> Tensor:
    """``grad`` with contiguous rows: kernels take rows with gaps between them, as those of a
    concatenation's gradient, without a copy."""
    return grad if grad.stride(1) == 1 else grad.contiguous()


class _LinearToOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionContext, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        keep_parameters(ctx, weight, bias)
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        ctx.save_for_backward(x, weight, bias)
        return linear_to_one_forward_op(x, weight, bias)

    @staticmethod
    @first_order("torchembed's linear layer", "torch.nn.functional.linear")
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        of_weight, of_bias = ctx.parameters
        grad_bias = gradient_memory(bias, of_bias) if ctx.needs_input_grad[2] else None
        if ctx.needs_input_grad[1]:
            grad_weight = gradient_memory(weight, of_weight)
        else:  # written all the same
            grad_weight = torch.empty_like(weight)
        grad_x = linear_to_one_backward_op(grad.contiguous(), x, weight, grad_weight, grad_bias)
        return grad_x, grad_weight if ctx.needs_input_grad[1] else None, grad_bias


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that ``torch.autocast`` casts to on the device of ``x``; None outside of it."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def check_layer(
    weight_name: str, weight: Tensor, bias_name: str, bias: Tensor | None, *, is_cast: bool
) -> None:
    """Raise unless ``weight`` and ``bias`` are those of a linear layer; ``is_cast`` where autocast
    casts them, which may have different dtypes then."""
    checks.check_float(weight_name, weight)
    checks.check_dim(weight_name, weight, 2)
    if bias is not None:
        checks.check_float(bias_name, bias)
        if not is_cast:
            checks.check_dtype(bias_name, bias, (weight.dtype,), _ADVICE)
        checks.check_dim(bias_name, bias, 1)
        checks.check_numel(bias_name, bias, weight.shape[0], f"one for each row of {weight_name}")


def check_input(x: Tensor, weight_name: str, weight: Tensor, *, is_cast: bool) -> None:
    """Raise unless ``x`` can be multiplied by ``weight``; ``is_cast`` is that of
    :func:`check_layer`."""
    if x.shape[-1:] != weight.shape[1:]:
        raise ValueError(
            f"x must be [..., {weight.shape[1]}] for a {weight_name} of shape "
            f"{tuple(weight.shape)}, got {tuple(x.shape)}"
        )
    if not is_cast:
        checks.check_dtype("x", x, (weight.dtype,), _ADVICE)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, as ``torch.nn.functional.linear``.

    Backward computes the gradient of ``x`` first; those of the parameters go to where an optimizer
    wants them, and that of ``weight`` may be deferred
    (:class:`~torchembed.autograd.weight_gradients.DeferredWeightGradients`), unless it has one row:
    then all are made in one pass.
    The sum over samples for ``bias`` is float32, in an order that the shape fixes. Never
    synchronizes. Under ``torch.autocast`` everything is cast. The gradient of a parameter has the
    parameter's own dtype; on a GPU, that of a float32 one is not rounded to autocast's on the way.

    Args:
        x: ``[..., K]``, float32, float16 or bfloat16.
        weight: ``[N, K]``, of the dtype of ``x``.
        bias: ``[N]``, likewise.

    Returns:
        ``[..., N]``.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit.
    """
    dtype = autocast_dtype(x)
    x = x if dtype is None else x.to(dtype)
    check_layer("weight", weight, "bias", bias, is_cast=dtype is not None)
    check_input(x, "weight", weight, is_cast=dtype is not None)
    checks.check_same_device("x", x, weight=weight, bias=bias)
    rows = x.reshape(-1, weight.shape[1])
    if weight.shape[0] == 1:
        out = _LinearToOne.apply(rows.contiguous(), weight.contiguous(), bias)
    else:
        out = _Linear.apply(rows, weight, bias)
    return out.view(*x.shape[:-1], weight.shape[0])


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``relu(x @ weight.T + bias)``: :func:`linear_relu_stack` of one layer.

    Arguments, result and errors are those of :func:`linear`.
    """
    return _relu_stack(x, {"weight": weight, "bias": bias})


def linear_relu_stack(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """Linear layers with a ReLU each: ``x[l+1] = relu(x[l] @ weights[l].T + biases[l])``.

    Each layer is one matrix product, whose epilogue adds the bias and applies the ReLU. Backward
    masks a layer's gradient and sums it for its bias in one pass, or in the epilogue of the product
    that makes it; layers below all that need gradients cost it nothing. The rest is as for
    :func:`linear`.

    Args:
        x: ``[..., K]``, float32, float16 or bfloat16.
        weights: ``[N, K]`` for each layer, of the dtype of ``x``, K being the N of the one before.
        biases: ``[N]`` for each layer, likewise.

    Returns:
        ``[..., N]``; ``x`` itself for no layers.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit.
    """
    if len(weights) != len(biases):
        raise ValueError(
            f"weights and biases must hold one tensor a layer, got {len(weights)} and {len(biases)}"
        )
    parameters: dict[str, Tensor] = {}
    for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        parameters |= {f"weights[{layer}]": weight, f"biases[{layer}]": bias}
    return _relu_stack(x, parameters) if parameters else x


def _relu_stack(x: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """The stack of the layers in ``parameters``: weight and bias of each in turn, by their names in
    errors."""
    dtype = autocast_dtype(x)
    x, is_cast = x if dtype is None else x.to(dtype), dtype is not None
    names, tensors = list(parameters), list(parameters.values())
    for position in range(0, len(names), 2):
        name, weight = names[position], tensors[position]
        check_layer(name, weight, names[position + 1], tensors[position + 1], is_cast=is_cast)
        if position == 0:
            check_input(x, name, weight, is_cast=is_cast)
            continue
        width = tensors[position - 2].shape[0]
        if weight.shape[1] != width:
            raise ValueError(
                f"{name} must have shape [N, {width}] after {names[position - 2]} of {width} rows, "
                f"got {tuple(weight.shape)}"
            )
        if not is_cast:
            checks.check_dtype(name, weight, (x.dtype,), _ADVICE)
    checks.check_same_device("x", x, **parameters)
    out = _LinearReluStack.apply(x.reshape(-1, x.shape[-1]), *tensors)
    return out.view(*x.shape[:-1], out.shape[1])
