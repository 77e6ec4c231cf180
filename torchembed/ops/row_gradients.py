"""Gradients of tables from gradients of looked-up rows: dense, sparse, or handed to a sink."""

import enum
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import Node

from torchembed.autograd.first_order import no_second_derivative
from torchembed.core.types import OptimizerKind
from torchembed.ops.rowwise_update import RowGradients, UpdateRule, rowwise_update
from torchembed.ops.segments import Runs, find_runs

GradientSink = Callable[[Tensor, RowGradients], None]
"""Function that backward calls with ``rows [L]`` and their gradients, in place of giving ``weight``
a gradient."""


class WeightGradient(enum.Enum):
    """Form of the gradient that a lookup gives its ``weight``."""

    DENSE = "dense"
    """A tensor of the weight's shape and dtype; rows that were not looked up are zeros."""
    SPARSE = "sparse"
    """An uncoalesced ``torch.sparse_coo`` tensor with one entry for each id, as torch makes it.
    Ids of row -1 contribute an entry of zeros to another row of the batch, so that an optimizer
    sees only touched rows; to row 0 where there is no other."""


ONCE_RECORDED = no_second_derivative(
    "a lookup in tables that an optimizer of torchembed's updates", "one of torch.optim for them"
)


def check_not_asked_for() -> None:
    """Raise ``RuntimeError`` where ``torch.autograd.grad`` asks for the gradient of a table that a
    sink takes; called in the backward of the lookup, before the sink is."""
    anchor = _next_of(torch._C._current_autograd_node())
    leaf = None if anchor is None else _next_of(anchor)
    if leaf is None:
        return
    try:
        torch._C._will_engine_execute_node(leaf)
    except RuntimeError as error:  # of leaves whose gradients are returned and not accumulated
        raise RuntimeError(ONCE_RECORDED) from error


def _next_of(node: Node) -> Node | None:
    return node.next_functions[0][0] if node.next_functions else None


def summed_gradients(runs: Runs, gradients: RowGradients) -> Tensor:
    """The sum of each run's gradients, float32 ``[L, D]``; zeros from ``num_runs`` on."""
    numbers = torch.arange(runs.order.numel(), device=runs.order.device)
    sums = torch.zeros(numbers.numel(), gradients.grad.shape[1], device=numbers.device)
    # zeros - (-1) * sum: updating row u by run u at a learning rate of -1 leaves the sum itself.
    numbered = Runs(numbers.where(numbers < runs.num_runs, -1), *runs[1:])
    rate = torch.full((1,), -1.0, device=numbers.device)
    rowwise_update(sums, (), numbered, gradients, UpdateRule(kind=OptimizerKind.SGD), rate)
    return sums


def table_gradient(
    rows: Tensor,
    gradients: RowGradients,
    shape: torch.Size,
    dtype: torch.dtype,
    form: WeightGradient,
    runs: Runs | None = None,
) -> Tensor:
    """The gradient of a weight of ``shape`` ``[R, D]`` for ``rows [L]`` and their ``gradients``.

    The dense form is deterministic, and float32 until its final rounding to ``dtype``; the sparse
    one is made by operations of PyTorch, which can be differentiated.

    Args:
        runs: runs of equal ``rows`` where they are known, which spares the dense form finding them.
    """
    if form is WeightGradient.DENSE:
        # The kernel of row updates adds up and writes: zeros - (-1) * sum is the sum itself.
        total = torch.zeros(shape, device=rows.device)
        rate = torch.full((1,), -1.0, device=rows.device)
        rule = UpdateRule(kind=OptimizerKind.SGD)
        runs = find_runs(rows, shape[0]) if runs is None else runs
        rowwise_update(total, (), runs, gradients, rule, rate)
        return total.to(dtype)
    grad, gradient_rows, scales = gradients
    if grad.shape[0] == 0:  # all of the ids are spare: there is no bag to take a gradient from
        values = grad.new_zeros(rows.numel(), shape[1])
    else:
        values = (grad if gradient_rows is None else grad[gradient_rows.long()]).float()
    if scales is not None:
        values = values * scales.unsqueeze(1)
    values = torch.where((rows >= 0).unsqueeze(1), values, 0.0).to(dtype)
    if shape[0] == 0 or rows.numel() == 0:  # there is no other row for the ids of row -1
        rows, values = rows[:0], values[:0]
    else:
        rows = torch.where(rows >= 0, rows, rows.amax()).clamp_min(0)
    indices = rows.long().unsqueeze(0)
    # As a context, since torch 2.11 warns of the argument.
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        return torch.sparse_coo_tensor(indices, values, shape)
