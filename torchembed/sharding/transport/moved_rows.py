"""Rows of a matrix in other places, each in one at most."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchembed.core.function_context import FunctionContext
from torchembed.ops.sequence_lookup.schema import sequence_lookup_forward_op


class RowMoves(NamedTuple):
    """Moves of ``n`` given rows to ``m`` rows of a result, in both directions."""

    sources: Tensor
    """int64 ``[m]``: the row that each row of the result is a copy of; -1 for zeros."""
    targets: Tensor
    """int64 ``[n]``: the row of the result that is a copy of each given row; -1 for none."""


def moves_from(sources: Tensor, num_rows: int) -> RowMoves:
    """The moves of ``num_rows`` rows by :attr:`RowMoves.sources`, of which each row is one at most
    once."""
    return RowMoves(sources, _inverse(sources, num_rows))


def moves_to(targets: Tensor, num_results: int) -> RowMoves:
    """The moves by :attr:`RowMoves.targets` to as many rows of a result, each of which is a target
    at most once."""
    return RowMoves(_inverse(targets, num_results), targets)


def _inverse(places: Tensor, count: int) -> Tensor:
    numbers = torch.arange(places.shape[0], device=places.device)
    # One more for those that go nowhere.
    inverse = numbers.new_full((count + 1,), -1)
    return inverse.scatter_(0, places.where(places >= 0, count), numbers)[:count]


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionContext, rows: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(targets)
        return sequence_lookup_forward_op(rows.contiguous(), sources, rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        (targets,) = ctx.saved_tensors
        return sequence_lookup_forward_op(grad.contiguous(), targets, grad.dtype), None, None


def moved(rows: Tensor, moves: RowMoves) -> Tensor:
    """``rows [n, D]`` where ``moves`` bring them, ``[m, D]``; float32, float16 or bfloat16.

    Forward and backward read each row once, and add nothing.
    """
    return _Moved.apply(rows, *moves)
