"""Rows of bags, padded to one length and back, without a wait for a GPU."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.function_context import FunctionContext


class PaddedLayout(NamedTuple):
    """Where the rows of bags are in a dense tensor ``[B, length, ...]``, both ways."""

    rows: Tensor
    """int64 ``[B, length]``: the row in each place; -1 in a place without one."""
    places: Tensor
    """int64 ``[L]``: the place of each row, counted through all bags; -1 for a row that is cut off
    or behind the last bag."""

    @classmethod
    def of(cls, offsets: Tensor, length: int, num_rows: int) -> "PaddedLayout":
        """The layout of the first ``length`` rows of each bag.

        Args:
            offsets: ``[B + 1]``, where bags begin and end.
            length: places of each bag.
            num_rows: rows ``L``, with those behind the last bag.
        """
        device = offsets.device
        starts, lengths = offsets[:-1].unsqueeze(1), offsets.diff().unsqueeze(1)
        within = torch.arange(length, device=device)
        rows = (starts + within).where(within < lengths, -1)
        positions = torch.arange(num_rows, device=device)
        bags = torch.searchsorted(offsets[1:].contiguous().long(), positions, right=True)
        within_bag = positions - offsets[bags.clamp_max(offsets.shape[0] - 1)]
        is_there = (bags < offsets.shape[0] - 1) & (within_bag < length)
        return cls(rows, (bags * length + within_bag).where(is_there, -1))

    def pad(self, values: Tensor) -> Tensor:
        """``values [L, ...]`` as ``[B, length, ...]``, zeros in places without a row."""
        return _Gathered.apply(values, self.rows, self.places)

    def pack(self, dense: Tensor) -> Tensor:
        """``dense [B, length, ...]`` as ``[L, ...]``, zeros for rows without a place."""
        rows = self.rows.flatten()
        return _Gathered.apply(dense.flatten(0, 1), self.places, rows)


def padded_dense(values: Tensor, offsets: Tensor, length: int, padding_value: float) -> Tensor:
    """``[B, length, ...]``: the first ``length`` rows of each bag, and ``padding_value`` behind.

    Backward gathers too, so that nothing is added in any order.

    Args:
        values: ``[L, ...]``; rows behind the last bag count for nothing.
        offsets: ``[B + 1]``, where bags begin and end.
    """
    layout = PaddedLayout.of(offsets, length, values.shape[0])
    dense = layout.pad(values)
    if padding_value == 0.0:
        return dense
    is_row = layout.rows >= 0
    return dense.masked_fill(~is_row.view(*is_row.shape, *[1] * (values.dim() - 1)), padding_value)


class _Gathered(torch.autograd.Function):
    """``source[index]``, zeros for an index of -1; ``inverse`` says which element of the result
    each row of the source became, -1 for none, so that the gradient is gathered likewise."""

    @staticmethod
    def forward(ctx: FunctionContext, source: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(index, inverse)
        return _rows_or_zeros(source, index)

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        index, inverse = ctx.saved_tensors
        flat = grad.flatten(0, index.dim() - 1)
        return _Gathered.apply(flat, inverse, index.flatten()), None, None


def _rows_or_zeros(source: Tensor, index: Tensor) -> Tensor:
    """``source[index]``; zeros for an index of -1."""
    shape = (*index.shape, *source.shape[1:])
    if not source.shape[0]:
        return source.new_zeros(shape)
    found = source.index_select(0, index.clamp_min(0).flatten()).view(shape)
    is_none = (index < 0).view(*index.shape, *[1] * (source.dim() - 1))
    return found.masked_fill(is_none, 0)
