"""Row-wise Adagrad for tables whose columns are sharded over ranks."""

import torch
from torch import Tensor

from torchembed.core.types import RUN_CHUNK, OptimizerKind
from torchembed.ops.row_gradients import summed_gradients
from torchembed.ops.rowwise_update import RowGradients, UpdateRule, rowwise_update
from torchembed.ops.rowwise_update.reference import root
from torchembed.ops.segments import Runs
from torchembed.tables import Table


def update_divided_columns(
    table: Table,
    runs: Runs,
    gradients: RowGradients,
    rule: UpdateRule,
    lr: Tensor,
    *,
    grad_multiplier: Tensor | None,
    skip: Tensor | None,
    stochastic: bool,
) -> None:
    """One step of row-wise Adagrad, with the mean of squares over the columns of all ranks.

    A batch touches the same rows on each rank that holds columns of the table, so their runs are
    the same, and one number for each run is summed over these ranks. The accumulators are then the
    unsharded table's, on each rank. It takes more passes over the summed gradients than
    :func:`~torchembed.ops.rowwise_update.rowwise_update`, whose arguments these are.

    Args:
        table: alone in its group; all ranks that hold its columns call this at the same step.
    """
    assert table.sum_over_columns is not None
    group = table.group
    weight, (state,) = group.weight, group.states
    gradient = summed_gradients(runs, gradients)
    rows = runs.unique_rows.long().clamp_min(0)
    if grad_multiplier is not None:
        gradient = gradient * grad_multiplier
    if rule.max_gradient > 0:
        gradient = gradient.clamp(-rule.max_gradient, rule.max_gradient)
    if rule.weight_decay != 0:
        gradient = gradient + rule.weight_decay * weight[rows].float()

    squares = table.sum_over_columns((gradient * gradient).sum(dim=1))
    num_sums = squares.shape[0]
    rows, gradient = rows[:num_sums], gradient[:num_sums]
    numbers = torch.arange(num_sums + 1, device=weight.device, dtype=torch.int32)
    is_updated = numbers[:-1] < runs.num_runs
    if skip is not None:
        is_updated = is_updated & (skip == 0)
    # Divided by a tensor: for a number a GPU would multiply by the reciprocal, and round twice.
    # Entries past the last run add zero to row 0.
    mean = squares / squares.new_full((), table.spec.dim)
    added = torch.where(is_updated, mean, 0.0)
    total = state[rows] + added
    state.index_add_(0, rows, added)
    divisor = root(total) + rule.eps
    # One gradient for each run is left, so runs have one position each and no whole chunks.
    no_chunks = numbers.new_full((num_sums // RUN_CHUNK,), -1)
    rowwise_update(
        weight,
        (),
        Runs(runs.unique_rows[:num_sums], numbers, numbers[:-1], runs.num_runs, no_chunks),
        RowGradients(gradient / divisor.unsqueeze(1)),
        UpdateRule(kind=OptimizerKind.SGD),
        lr,
        step=group.step,
        skip=skip,
        rounding=group.rounding_keys if stochastic else None,
    )
