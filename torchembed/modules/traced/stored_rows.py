"""Rows of tables in host memory, in programs of ``torch.compile`` and ``torch.export``.

A program has the tables' parameters as arguments, which do not hold what the cache on the device
holds of them. One operation finds the tables by these and reads each row from where it is.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.core.function_context import FunctionContext
from torchembed.tables import TieredGroup, table_at


def _read(weights: Sequence[Tensor], rows: Tensor) -> Tensor:
    found = rows.new_zeros(rows.numel(), weights[0].shape[1], dtype=weights[0].dtype)
    ends = list(itertools.accumulate((len(weight) for weight in weights), initial=0))
    for weight, (first, end) in zip(weights, itertools.pairwise(ends), strict=True):
        is_here = (rows >= first) & (rows < end)
        table, of_table = table_at(weight), torch.where(is_here, rows - first, -1)
        group = None if table is None else table.group
        if table is not None and isinstance(group, TieredGroup):
            of_group = of_table + group.first_row_of(table)
            vectors = group.gathered_rows(torch.where(is_here, of_group, -1))
        else:  # of a program that was loaded, which has weights of its own
            vectors = weight[torch.where(is_here, of_table, 0)] if len(weight) else found
        found = torch.where(is_here.unsqueeze(1), vectors, found)
    return found


def _read_fake(weights: Sequence[Tensor], rows: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights[0].shape[1], dtype=weights[0].dtype)


def _refuse(grad: Tensor) -> Tensor:
    raise RuntimeError(
        "tables in host memory must not be trained by a program of torch.compile, which brings no "
        "rows to the device; compile the modules that take the vectors, without the tables, or "
        "call the program under torch.no_grad() where nothing is trained"
    )


_read_op = torch.library.custom_op(
    "torchembed::read_rows_of_tables",
    _read,
    mutates_args=(),
    schema="(Tensor[] weights, Tensor rows) -> Tensor",
    # The replay of a graph would find no table.
    tags=(torch.Tag.cudagraph_unsafe,),
)
_read_op.register_fake(_read_fake)
_refuse_op = torch.library.custom_op(
    "torchembed::refuse_gradients_of_stored_rows",
    _refuse,
    mutates_args=(),
    schema="(Tensor grad) -> Tensor",
)
_refuse_op.register_fake(lambda grad: grad.new_empty(1))


def _keep(ctx: FunctionContext, inputs: tuple[list[Tensor], Tensor], output: Tensor) -> None:
    ctx.shapes = [weight.shape for weight in inputs[0]]


def _backward(ctx: FunctionContext, grad: Tensor) -> tuple[list[Tensor], None]:
    # The program refuses when it runs: it may be one that only evaluates, and was made where
    # gradients are computed.
    refused = _refuse_op(grad)
    return [refused.expand(shape) for shape in ctx.shapes], None


_read_op.register_autograd(_backward, setup_context=_keep)


def read_rows_of_tables(weights: Sequence[Tensor], rows: Tensor) -> Tensor:
    """``[L, D]``: a copy of each of ``rows [L]``, numbered through the ``weights [R, D]``, whose
    tables live in host memory; zeros for row -1. Changes nothing.

    Raises:
        RuntimeError: in a backward.
    """
    return _read_op(list(weights), rows)
