"""Gradients of tables that several ranks hold: their mean over ranks, the rule of DDP, and sums
over columns."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchembed.core.gradient_slots import FlatSpans
from torchembed.ops.row_gradients import WeightGradient, weight_gradient
from torchembed.ops.rowwise_update import RowGradients
from torchembed.sharding.collectives import gather_size
from torchembed.sharding.finished_work import all_reduce
from torchembed.sharding.pushed_mean import PushedMean


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


def row_gradient_mean(
    group: Any, push: PushedMean | None = None
) -> Callable[[Tensor, RowGradients, Tensor], Any]:
    """How a replicated table's recorded gradients become the mean over ranks.

    The result is a function of ``(rows, gradients, weight)`` that gives ``(rows, gradients)``: one
    dense gradient for each row of ``weight [R, D]``, equal on all ranks, and -1 for each row that
    no rank has touched. It is called by every rank in the same backward, and sums over ``group``,
    or takes the mean by ``push``.
    """

    def reduce(
        rows: Tensor, gradients: RowGradients, weight: Tensor
    ) -> tuple[Tensor, RowGradients]:
        num_rows, dim = weight.shape
        dense = weight_gradient(rows, gradients, weight.shape, torch.float32, WeightGradient.DENSE)
        touched = torch.zeros(num_rows + 1, device=weight.device)
        # By scatter_, since setting by index copies the number from the host.
        touched.scatter_(0, torch.where(rows >= 0, rows, num_rows).long(), 1.0)
        flat = torch.cat([dense.reshape(-1), touched[:num_rows]])
        if push is None:
            all_reduce(flat, group)
        else:
            push.take(FlatSpans(flat, [(0, flat.numel())]), flat.dtype)
        dense = flat[: num_rows * dim].view(num_rows, dim)
        if push is None:
            dense = dense / dist.get_world_size(group)
        numbers = torch.arange(num_rows, device=weight.device, dtype=rows.dtype)
        return torch.where(flat[num_rows * dim :] > 0, numbers, -1), RowGradients(dense)

    return reduce
