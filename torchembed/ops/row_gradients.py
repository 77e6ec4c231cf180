"""What becomes of a lookup's gradient: a dense or sparse tensor, or an entry in a sink."""

import enum
from collections.abc import Callable

import torch
from torch import Tensor

from torchembed.core.types import OptimizerKind
from torchembed.ops.rowwise_update import RowGradients, UpdateRule, rowwise_update
from torchembed.ops.segments import find_runs

GradientSink = Callable[[Tensor, RowGradients], None]
"""Takes ``rows [L]`` and their gradients during backward, in place of a gradient of ``weight``."""


class WeightGradient(enum.Enum):
    """Form of the gradient that a lookup gives its ``weight``."""

    DENSE = "dense"
    """A tensor of the weight's shape and dtype; rows that were not looked up are zeros."""
    SPARSE = "sparse"
    """An uncoalesced ``torch.sparse_coo`` tensor with one entry for each id, as torch makes it.
    Ids of row -1 contribute an entry of zeros to row 0."""


def weight_gradient(
    rows: Tensor, gradients: RowGradients, weight: Tensor, form: WeightGradient
) -> Tensor:
    """The gradient of ``weight [R, D]`` for ``rows [L]`` and their ``gradients``, in ``form``.

    The dense form is deterministic and float32 until its final rounding to the weight's dtype.
    """
    if form is WeightGradient.DENSE:
        # zeros - 1 * sum = the negated sum, so a learning rate of -1 leaves the sum itself.
        total = torch.zeros(weight.shape, device=weight.device, dtype=torch.float32)
        negative_one = torch.full((1,), -1.0, device=weight.device)
        runs = find_runs(rows, weight.shape[0])
        rowwise_update(
            total, (), runs, gradients, UpdateRule(kind=OptimizerKind.SGD), negative_one
        )
        return total.to(weight.dtype)
    grad, gradient_rows, scales = gradients
    if grad.shape[0] == 0:  # all of the ids are spare: there is no bag to take a gradient from
        values = grad.new_zeros(rows.numel(), weight.shape[1])
    else:
        values = (grad if gradient_rows is None else grad[gradient_rows.long()]).float()
    if scales is not None:
        values = values * scales.unsqueeze(1)
    values = torch.where((rows >= 0).unsqueeze(1), values, 0.0).to(weight.dtype)
    if weight.shape[0] == 0:  # there is no row 0 for the ids of row -1
        rows, values = rows[:0], values[:0]
    return torch.sparse_coo_tensor(
        rows.long().clamp_min(0).unsqueeze(0), values, weight.shape, check_invariants=False
    )
