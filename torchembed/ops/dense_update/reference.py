"""The specification of ``dense_update`` in eager torch."""

import torch
from torch import Tensor

from torchembed.core.types import OptimizerKind
from torchembed.core.update_records import DenseUpdate
from torchembed.ops.rowwise_update.reference import root

_BLOCK = 1 << 15
"""Elements updated at once, few enough that intermediate results stay in a CPU's cache."""


def dense_update_reference(update: DenseUpdate) -> None:
    for start, stop in update.parts():
        for first in range(start, stop, _BLOCK):
            _update_block(_block_of(update, slice(first, min(first + _BLOCK, stop))))


def _block_of(update: DenseUpdate, block: slice) -> DenseUpdate:
    """``update`` with one block of its flat tensors in their place."""

    def part(flat: Tensor | None) -> Tensor | None:
        return None if flat is None else flat[block]

    return update._replace(
        weight=update.weight[block],
        state0=part(update.state0),
        state1=part(update.state1),
        rounded=part(update.rounded),
        grad=update.grad[block],
    )


def _update_block(update: DenseUpdate) -> None:
    weight, state0, state1, step = update.weight, update.state0, update.state1, update.step

    def write(target: Tensor, updated: Tensor) -> None:
        if update.skip is not None:
            updated = torch.where(update.skip.reshape(1) == 0, updated, target)
        target.copy_(updated)

    gradient = update.grad.float()
    if update.grad_multiplier is not None:
        gradient = gradient * update.grad_multiplier
    if update.weight_decay != 0:
        gradient = gradient + update.weight_decay * weight
    if update.optimizer == OptimizerKind.SGD:
        change = update.lr * gradient
    elif update.optimizer == OptimizerKind.ADAGRAD:
        assert state0 is not None
        total = state0 + gradient * gradient
        write(state0, total)
        change = update.lr * (gradient / (root(total) + update.eps))
    else:
        assert update.optimizer == OptimizerKind.ADAM
        assert state0 is not None and state1 is not None and step is not None
        mean = state0 + (gradient - state0) * (1 - update.beta1)
        square = state1 + (gradient * gradient - state1) * (1 - update.beta2)
        write(state0, mean)
        write(state1, square)
        # In float64, since powers of a beta near 1 lose their digits in float32.
        count = step.double()
        step_size = (update.lr.double() / (1 - update.beta1**count)).float()
        root_correction = (1 - update.beta2**count).sqrt().float()
        change = step_size * (mean / (root(square) / root_correction + update.eps))
    write(weight, weight - change)
    if update.rounded is not None:
        write(update.rounded, weight.to(update.rounded.dtype))
