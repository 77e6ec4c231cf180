"""Copies of columns between matrices, in one pass for each matrix."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchembed.core.copies.columns import ColumnCopy, copies_on_device
from torchembed.core.function_context import FunctionContext
from torchembed.ops.push import copy_rectangles


def place_columns(values: Tensor, others: Sequence[tuple[Tensor, Sequence[ColumnCopy]]]) -> Tensor:
    """``values [B, columns]`` with columns of ``others``, each with its copies, written to it in
    place.

    Gradients go to the others. ``values`` gets the whole gradient: its producer knows which of the
    columns are its own.
    """
    if not others:
        return values
    tensors, copies = zip(*others, strict=True)
    return _Place.apply(values, copies, *tensors)


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionContext,
        values: Tensor,
        copies: Sequence[Sequence[ColumnCopy]],
        *others: Tensor,
    ) -> Tensor:
        ctx.mark_dirty(values)
        ctx.placed = place_in(values, others, copies)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, *taken_from(grad, ctx.placed)


Placed = list[tuple[torch.Size, Sequence[ColumnCopy]]]
"""The shape of each matrix of which columns were placed, and the copies of them."""


def place_in(
    values: Tensor, others: Sequence[Tensor], copies: Sequence[Sequence[ColumnCopy]]
) -> Placed:
    """Copy columns of each of ``others`` to ``values``, without gradients."""
    for other, of_other in zip(others, copies, strict=True):
        _copy_columns(other, of_other, values)
    return [(other.shape, of_other) for other, of_other in zip(others, copies, strict=True)]


def taken_from(values: Tensor, placed: Placed) -> list[Tensor]:
    """The columns that :func:`place_in` has written, in new matrices of the shapes they came
    from."""
    taken = [values.new_empty(shape) for shape, _ in placed]
    for out, (_, copies) in zip(taken, placed, strict=True):
        _copy_columns(values, [copy.back for copy in copies], out)
    return taken


def _copy_columns(source: Tensor, copies: Sequence[ColumnCopy], out: Tensor) -> None:
    """Copy columns of ``source`` to ``out``, which has as many rows and is contiguous."""
    copy_rectangles(source, copies_on_device(copies, out), out)
