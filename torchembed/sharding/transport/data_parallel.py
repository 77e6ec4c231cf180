"""Gradients of tables that several ranks hold: their mean over ranks, the rule of DDP, and sums
over columns."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchembed.ops.row_gradients import WeightGradient, weight_gradient
from torchembed.ops.rowwise_update import RowGradients
from torchembed.sharding.transport.collectives import gather_size
from torchembed.sharding.transport.gradient_mean import GradientMean
from torchembed.tables import GradientReduction, RecordedGradients


def sum_over_columns(group: Any) -> Callable[[Tensor], Tensor]:
    """The ``sum_over_columns`` of a table whose columns are on the ranks of ``group``.

    Adds in the order of ranks, so that all have the same bits. No GPU is waited for.
    """

    def total(numbers: Tensor) -> Tensor:
        capacities = gather_size(numbers.shape[0], group)
        mine = numbers[: min(capacities)].contiguous()
        by_rank = [torch.empty_like(mine) for _ in capacities]
        dist.all_gather(by_rank, mine, group=group)
        return torch.stack(by_rank).sum(0)

    return total


def max_over(group: Any) -> Callable[[Tensor], None]:
    """The ``max_over_holders`` of a model's tables, which are on the ranks of ``group``."""

    def reduce(number: Tensor) -> None:
        dist.all_reduce(number, dist.ReduceOp.MAX, group=group)

    return reduce


_ALIGNMENT = 64
"""Elements; what is averaged by push is moved in rows of so many."""


def row_gradient_mean(mean_of_now: Callable[[], GradientMean]) -> GradientReduction:
    """How a replicated table's recorded gradients become the mean over ranks.

    They travel with the dense gradients, by the ``GradientMean`` that ``mean_of_now()`` gives: one
    gradient for each row, and a number that says whether any rank has touched it; where none has,
    what is recorded has row -1. Every rank records in the same backward.
    """

    def reduce(
        recorded: RecordedGradients, weight: Tensor, record: Callable[[Tensor, RowGradients], None]
    ) -> None:
        mean, rows = mean_of_now(), recorded.rows
        num_rows, dim = weight.shape
        dense = weight_gradient(
            rows,
            recorded.gradients,
            weight.shape,
            mean.numbers_dtype,
            WeightGradient.DENSE,
            recorded.known_runs,
        )
        spare = 1 + -(dense.numel() + num_rows + 1) % _ALIGNMENT
        touched = dense.new_zeros(num_rows + spare)
        # By scatter_, since setting by index copies the number from the host.
        touched.scatter_(0, torch.where(rows >= 0, rows, num_rows).long(), 1.0)

        def put(flat: Tensor) -> None:
            dense = flat[: num_rows * dim].view(num_rows, dim)
            are_touched = flat[num_rows * dim :][:num_rows] > 0
            numbers = torch.arange(num_rows, device=weight.device, dtype=rows.dtype)
            record(torch.where(are_touched, numbers, -1), RowGradients(dense))

        mean.add(torch.cat([dense.reshape(-1), touched]), put)

    return reduce
