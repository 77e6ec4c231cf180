"""Rows of bags, padded to one length and back, without a wait for a GPU."""

import torch
from torch import Tensor

from torchembed.core.function_context import FunctionContext


def padded_dense(values: Tensor, offsets: Tensor, length: int, padding_value: float) -> Tensor:
    """``[B, length, ...]``: the first ``length`` rows of each bag, and ``padding_value`` behind.

    Backward gathers too, so that nothing is added in any order.

    Args:
        values: ``[L, ...]``; rows behind the last bag count for nothing.
        offsets: ``[B + 1]``, where bags begin and end.
    """
    starts, lengths = offsets[:-1].unsqueeze(1), offsets.diff().unsqueeze(1)
    places = torch.arange(length, device=values.device)
    is_row = places < lengths
    dense = _PaddedDense.apply(values, offsets, (starts + places).where(is_row, -1))
    if padding_value == 0.0:
        return dense
    shape = (*is_row.shape, *[1] * (values.dim() - 1))
    return dense.masked_fill(~is_row.view(shape), padding_value)


class _PaddedDense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionContext, values: Tensor, offsets: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(offsets, rows)
        ctx.num_rows = values.shape[0]
        return rows_or_zeros(values, rows)

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        offsets, rows = ctx.saved_tensors
        return _PackedRows.apply(grad, offsets, rows, ctx.num_rows), None, None


class _PackedRows(torch.autograd.Function):
    """The rows of bags from padded ones; zeros for those that were cut off."""

    @staticmethod
    def forward(
        ctx: FunctionContext, dense: Tensor, offsets: Tensor, rows: Tensor, num_rows: int
    ) -> Tensor:
        ctx.save_for_backward(offsets, rows)
        length = dense.shape[1]
        positions = torch.arange(num_rows, device=dense.device)
        bags = torch.searchsorted(offsets[1:].contiguous().long(), positions, right=True)
        within = positions - offsets[bags.clamp_max(offsets.shape[0] - 1)]
        is_there = (bags < offsets.shape[0] - 1) & (within < length)
        return rows_or_zeros(dense.flatten(0, 1), (bags * length + within).where(is_there, -1))

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        offsets, rows = ctx.saved_tensors
        return _PaddedDense.apply(grad, offsets, rows), None, None, None


def rows_or_zeros(values: Tensor, rows: Tensor) -> Tensor:
    """``values[rows]``, of ``rows`` of any shape; zeros for a row of -1."""
    shape = (*rows.shape, *values.shape[1:])
    if torch.compiler._is_exporting_flag:
        # A program serves batches without any row, too, and cannot ask for their number.
        with_none = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
        places = rows.where(rows >= 0, values.shape[0])
        return with_none.index_select(0, places.flatten()).view(shape)
    if not values.shape[0]:
        return values.new_zeros(shape)
    found = values.index_select(0, rows.clamp_min(0).flatten()).view(shape)
    is_none = (rows < 0).view(*rows.shape, *[1] * (values.dim() - 1))
    return found.masked_fill(is_none, 0)
