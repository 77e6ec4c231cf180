"""The public function ``join_columns``, differentiable any number of times."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.autograd.first_order import creates_graph
from torchembed.core.checks import FLOAT_DTYPES
from torchembed.core.function_context import FunctionContext
from torchembed.ops.columns.reference import join_columns_reference
from torchembed.ops.columns.schema import join_columns_op, split_columns_op


def join_columns(
    parts: Sequence[Tensor], targets: Sequence[int], widths: Sequence[int], num_columns: int
) -> Tensor:
    """Matrices side by side, as ``torch.cat(..., dim=1)``, with their columns in another order.

    A piece is ``widths[i]`` neighbouring columns, and is written from column ``targets[i]`` on; the
    pieces of all parts are counted one part after the other. Example: parts ``[[1, 2, 3]]`` and
    ``[[4]]`` of pieces of widths 1, 2 and 1 for the columns 3, 1 and 0: ``[[4, 2, 3, 1]]``.

    Args:
        parts: ``[B, columns]``, floating, all of one dtype; at least one.
        targets: pieces cover the columns from the least of them to ``num_columns`` once each.
        widths: those of the pieces of a part add up to its columns.
        num_columns: of the result.

    Returns:
        ``[B, num_columns]``, new; the columns before the first piece hold anything.

    Raises:
        TypeError, ValueError: for a dtype, shape, device or numbers that do not fit.
    """
    if torch.compiler.is_compiling() or parts[0].dtype not in FLOAT_DTYPES:
        # Compilers make copies of their own, and kernels do not copy float64.
        return join_columns_reference(list(parts), list(targets), list(widths), num_columns)
    whole_rows = [part if part.stride(-1) == 1 else part.contiguous() for part in parts]
    return _JoinColumns.apply(list(targets), list(widths), num_columns, *whole_rows)


class _JoinColumns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionContext,
        targets: list[int],
        widths: list[int],
        num_columns: int,
        *parts: Tensor,
    ) -> Tensor:
        ctx.pieces, ctx.part_columns = (targets, widths), [part.shape[1] for part in parts]
        return join_columns_op(list(parts), targets, widths, num_columns)

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        targets, widths = ctx.pieces
        split = _SplitColumns.apply if creates_graph() else _split
        return None, None, None, *split(grad, targets, widths, ctx.part_columns)


class _SplitColumns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionContext,
        joined: Tensor,
        targets: list[int],
        widths: list[int],
        part_columns: list[int],
    ) -> tuple[Tensor, ...]:
        ctx.pieces, ctx.num_columns = (targets, widths), joined.shape[1]
        return _split(joined, targets, widths, part_columns)

    @staticmethod
    def backward(ctx: FunctionContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        targets, widths = ctx.pieces
        joined = join_columns(grads, targets, widths, ctx.num_columns)
        # The columns before the first piece are in no part.
        is_in_a_part = torch.arange(ctx.num_columns, device=joined.device) >= min(targets)
        return torch.where(is_in_a_part, joined, 0), None, None, None


def _split(
    joined: Tensor, targets: list[int], widths: list[int], part_columns: list[int]
) -> tuple[Tensor, ...]:
    whole_rows = joined if joined.stride(-1) == 1 else joined.contiguous()
    return tuple(split_columns_op(whole_rows, targets, widths, part_columns))
