"""The specification of ``dense_update`` in eager torch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchembed.core.types import OptimizerKind
from torchembed.ops.rowwise_update.reference import root

_BLOCK = 1 << 15
"""Elements updated at once, so that what lies between is in a CPU's cache."""


def dense_update_reference(*arguments: Any) -> None:
    """The arguments are the schema's: five flat tensors, four scalars, where parts begin and end in
    turn, and the rule."""
    flat, scalars, bounds, rule = arguments[:5], arguments[5:9], arguments[9], arguments[10:]
    for start, stop in parts_of(bounds):
        for first in range(start, stop, _BLOCK):
            block = slice(first, min(first + _BLOCK, stop))
            blocks: list[Any] = [None if tensor is None else tensor[block] for tensor in flat]
            _update_block(*blocks, *scalars, *rule)


def parts_of(bounds: Sequence[int]) -> list[tuple[int, int]]:
    """Each part's begin and end."""
    return list(zip(bounds[::2], bounds[1::2], strict=True))


def _update_block(
    weight: Tensor,
    state0: Tensor | None,
    state1: Tensor | None,
    rounded: Tensor | None,
    grad: Tensor,
    lr: Tensor,
    step: Tensor | None,
    grad_multiplier: Tensor | None,
    skip: Tensor | None,
    optimizer: int,
    eps: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None:
    def write(target: Tensor, updated: Tensor) -> None:
        target.copy_(
            updated if skip is None else torch.where(skip.reshape(1) == 0, updated, target)
        )

    gradient = grad.float()
    if grad_multiplier is not None:
        gradient = gradient * grad_multiplier
    if weight_decay != 0:
        gradient = gradient + weight_decay * weight
    if optimizer == OptimizerKind.SGD:
        change = lr * gradient
    elif optimizer == OptimizerKind.ADAGRAD:
        assert state0 is not None
        total = state0 + gradient * gradient
        write(state0, total)
        change = lr * (gradient / (root(total) + eps))
    else:
        assert optimizer == OptimizerKind.ADAM
        assert state0 is not None and state1 is not None and step is not None
        mean = state0 + (gradient - state0) * (1 - beta1)
        square = state1 + (gradient * gradient - state1) * (1 - beta2)
        write(state0, mean)
        write(state1, square)
        count = step.double()
        step_size = (lr.double() / (1 - beta1**count)).float()
        root_correction = (1 - beta2**count).sqrt().float()
        change = step_size * (mean / (root(square) / root_correction + eps))
    write(weight, weight - change)
    if rounded is not None:
        write(rounded, weight.to(rounded.dtype))
