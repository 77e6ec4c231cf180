"""Gradients of tables that several ranks hold: their mean over ranks, as in DDP, and sums over
columns."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from torchembed.ops.row_gradients import WeightGradient, table_gradient
from torchembed.ops.rowwise_update import RowGradients
from torchembed.sharding.transport.collectives import gather_size
from torchembed.sharding.transport.gradient_mean import GradientMean
from torchembed.tables import GradientReduction, RecordedGradients


def sum_over_columns(group: dist.ProcessGroup | None) -> Callable[[Tensor], Tensor]:
    """A function for ``Table.sum_over_columns``: the sum over the ranks of ``group``, which hold
    the columns of one table.

    It adds in the order of ranks, so that all get the same bits. The host waits for no GPU.
    """

    def total(numbers: Tensor) -> Tensor:
        capacities = gather_size(numbers.shape[0], group)
        # Capacities differ between ranks, runs do not: all of them fit into the smallest.
        mine = numbers[: min(capacities)].contiguous()
        by_rank = [torch.empty_like(mine) for _ in capacities]
        dist.all_gather(by_rank, mine, group=group)
        return torch.stack(by_rank).sum(0)

    return total


def max_over(group: dist.ProcessGroup | None) -> Callable[[Tensor], None]:
    """A function for ``Table.max_over_holders``: the maximum over the ranks of ``group``, in
    place."""

    def reduce(number: Tensor) -> None:
        dist.all_reduce(number, dist.ReduceOp.MAX, group=group)

    return reduce


_ALIGNMENT = 64
"""Elements to which tensors are padded, since push copies rows of as many."""


def row_gradient_mean(mean_of_now: Callable[[], GradientMean]) -> GradientReduction:
    """A function for ``Table.gradient_reduction`` of replicated tables: the mean over ranks.

    Gradients are averaged in the buckets of the dense ones, by the ``GradientMean`` that
    ``mean_of_now()`` returns: a gradient for each row, and a mark that is positive if any rank has
    touched the row. A row that none has touched is recorded as row -1. Every rank records in the
    same backward.

    A gradient for each row of the table, touched or not, has a size that no rank must tell others,
    and a sum in one order; placements whose exchange grows with the batch are for large tables.
    """

    def reduce(
        recorded: RecordedGradients, weight: Tensor, record: Callable[[Tensor, RowGradients], None]
    ) -> None:
        mean, rows = mean_of_now(), recorded.rows
        num_rows, dim = weight.shape
        dense = table_gradient(
            rows,
            recorded.gradients,
            weight.shape,
            mean.numbers_dtype,
            WeightGradient.DENSE,
            recorded.known_runs,
        )
        spare = 1 + -(dense.numel() + num_rows + 1) % _ALIGNMENT
        touched = dense.new_zeros(num_rows + spare)
        # scatter_ takes the number itself, where assignment by index would copy it from the host.
        touched.scatter_(0, torch.where(rows >= 0, rows, num_rows).long(), 1.0)

        def put(flat: Tensor) -> None:
            dense = flat[: num_rows * dim].view(num_rows, dim)
            are_touched = flat[num_rows * dim :][:num_rows] > 0
            numbers = torch.arange(num_rows, device=weight.device, dtype=rows.dtype)
            record(torch.where(are_touched, numbers, -1), RowGradients(dense))

        mean.add(torch.cat([dense.reshape(-1), touched]), put)

    return reduce
