"""Gradients of biases: sums over samples, which other kernels make in part on their way."""

import torch
from torch import Tensor

from torchembed.autograd.weight_gradients import (
    Parameter,
    gradient_memory,
    weight_gradient,
)
from torchembed.core.types import ROWS_OF_PARTIAL
from torchembed.ops.linear.schema import sum_partials_op


def empty_sums(
    bias: Tensor, parameter: Parameter, num_rows: int, *, has_partials: bool = True
) -> Tensor:
    """Memory for an operation's sums over ``num_rows`` samples, for the gradient of ``bias [N]``.

    That is float32 ``[P, N]`` for partial sums over
    :data:`~torchembed.core.types.ROWS_OF_PARTIAL` samples each, which :func:`bias_gradient` adds
    up, later where gradients of weights are deferred, with the same result. Where the operation
    gives no partial sums, it is the gradient's own memory, ``[N]``.

    Args:
        bias: the saved tensor.
        parameter: the parameter behind it, as
            :func:`~torchembed.autograd.weight_gradients.keep_parameters` kept it.
        has_partials: True where the operation can give partial sums.
    """
    if not has_partials:
        return gradient_memory(bias, parameter)
    num_partials = -(-num_rows // ROWS_OF_PARTIAL)
    return torch.empty(num_partials, bias.numel(), device=bias.device, dtype=torch.float32)


def bias_gradient(bias: Tensor, parameter: Parameter, sums: Tensor) -> Tensor | None:
    """The gradient of ``bias`` from ``sums``, for ``backward`` to return; None where deferred.

    Arguments are those of :func:`empty_sums`.
    """
    if sums.dim() == 1:
        return sums

    def total(memory: Tensor | None) -> Tensor:
        if memory is None:
            memory = torch.empty_like(bias, dtype=parameter.dtype)
        sum_partials_op(sums, memory)
        return memory

    return weight_gradient(parameter, total)
