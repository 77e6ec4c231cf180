"""Concatenation of matrices along columns, in place where the last was made with free columns."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.core.function_context import FunctionContext


class _ReservedColumns:
    """The free columns at the beginning of a matrix whose other columns hold looked-up vectors."""

    def __init__(self, whole: Tensor, num_columns: int) -> None:
        self._whole, self._num_columns = whole, num_columns
        self._are_taken = False

    def filled(self, leading: Sequence[Tensor]) -> Tensor | None:
        """The whole matrix with ``leading`` in its free columns; None where that does not fit, or
        they are taken already."""
        whole = self._whole
        is_alike = all(
            (part.shape[0], part.dtype, part.device) == (whole.shape[0], whole.dtype, whole.device)
            for part in leading
        )
        num_columns = sum(part.shape[1] for part in leading)
        if self._are_taken or not is_alike or num_columns != self._num_columns:
            return None
        self._are_taken = True
        return _Fill.apply(whole, *leading)


class _Fill(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionContext, whole: Tensor, *leading: Tensor) -> Tensor:
        ctx.widths = [part.shape[1] for part in leading]
        # Written through .data, so that the version counter stays: other functions have saved views
        # of this memory for backward, and only columns that nobody has read change.
        filled, first = whole.data, 0
        for part in leading:
            filled[:, first : first + part.shape[1]] = part
            first += part.shape[1]
        return filled

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *grad[:, : sum(ctx.widths)].split(ctx.widths, dim=1)


def after_reserved(whole: Tensor, num_reserved: int) -> Tensor:
    """The columns of ``whole [B, N]`` after the first ``num_reserved``, which are for
    :func:`side_by_side`: what they hold until then does not matter."""
    if not num_reserved:
        return whole
    values = whole[:, num_reserved:]
    if not torch.compiler.is_compiling():
        values.torchembed_reserved = _ReservedColumns(whole, num_reserved)  # type: ignore[attr-defined]
    return values


def joined_in_place(parts: Sequence[Tensor]) -> Tensor | None:
    """The result of :func:`side_by_side` where it need not copy the last part; else None."""
    if len(parts) < 2 or torch.compiler.is_compiling():
        return None
    reserved = getattr(parts[-1], "torchembed_reserved", None)
    return None if reserved is None else reserved.filled(parts[:-1])


def side_by_side(*parts: Tensor) -> Tensor:
    """``torch.cat(parts, dim=1)`` for an interaction layer.

    Vectors that a collection has looked up with as many ``reserved_columns`` as the parts before
    them have stay where they are, once, and only these are copied. The result is then the memory of
    these vectors: change neither in place. Gradients of the parts are views of one.

    Args:
        parts: ``[B, N1]``, ``[B, N2]`` and so on.

    Returns:
        ``[B, N1 + N2 ...]``; the part itself where there is one.
    """
    if len(parts) == 1:
        return parts[0]
    joined = joined_in_place(parts)
    return torch.cat(parts, dim=1) if joined is None else joined
