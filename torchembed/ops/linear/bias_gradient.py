"""Gradients of biases: sums over samples, of which a kernel that passes over them makes a part."""

import torch
from torch import Tensor

from torchembed.autograd.weight_gradients import are_deferred, gradient_memory, weight_gradient
from torchembed.core.types import ROWS_OF_PARTIAL
from torchembed.ops.linear.schema import sum_partials_op


def empty_sums(
    bias: Tensor, parameter: Tensor | None, num_rows: int, *, has_partials: bool = True
) -> Tensor:
    """Where an operation puts the sums over ``num_rows`` samples for ``bias [N]``: its gradient's
    memory, ``[N]``. Where gradients of weights are deferred, and the operation has partial sums
    over :data:`~torchembed.core.types.ROWS_OF_PARTIAL` samples, float32 ``[P, N]`` for these, which
    :func:`bias_gradient` adds.

    Args:
        bias: as it was saved; ``parameter``, as it was kept.
    """
    if not (has_partials and are_deferred()):
        return gradient_memory(bias, parameter)
    num_partials = -(-num_rows // ROWS_OF_PARTIAL)
    return torch.empty(num_partials, bias.numel(), device=bias.device, dtype=torch.float32)


def bias_gradient(bias: Tensor, parameter: Tensor | None, sums: Tensor) -> Tensor | None:
    """What ``backward`` returns for ``bias``, once ``sums`` are there; arguments as for
    :func:`empty_sums`."""
    if sums.dim() == 1:
        return sums

    def total(memory: Tensor | None) -> Tensor:
        memory = torch.empty_like(bias) if memory is None else memory
        sum_partials_op(sums, memory)
        return memory

    return weight_gradient(parameter, total)
