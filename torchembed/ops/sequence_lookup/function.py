"""The public function ``sequence_lookup`` and its gradients of every order."""

import torch
from torch import Tensor

from torchembed.autograd.first_order import creates_graph
from torchembed.core.function_context import FunctionContext
from torchembed.ops.row_gradients import (
    GradientSink,
    WeightGradient,
    check_not_asked_for,
    table_gradient,
)
from torchembed.ops.rowwise_update import RowGradients
from torchembed.ops.sequence_lookup.schema import sequence_lookup_forward_op


class _SequenceLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionContext,
        weight: Tensor,
        rows: Tensor,
        output_dtype: torch.dtype,
        form: WeightGradient,
        sink: GradientSink | None,
    ) -> Tensor:
        out = sequence_lookup_forward_op(weight, rows, output_dtype)
        # R and the dtype are saved by a tensor without elements: Dynamo keeps no sizes in ctx.
        ctx.save_for_backward(rows, weight.new_empty(weight.shape[0], 0))
        ctx.form, ctx.sink = form, sink
        return out

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, rows_like = ctx.saved_tensors
        grad_weight = None
        if ctx.sink is not None:
            if creates_graph():
                check_not_asked_for()
            with torch.no_grad():
                ctx.sink(rows, RowGradients(grad.contiguous()))
        elif creates_graph() and ctx.form is WeightGradient.DENSE:
            grad_weight = _TableGradient.apply(grad, rows, rows_like)
        else:
            grad_weight = _table_gradient(grad, rows, rows_like, ctx.form)
        return grad_weight, None, None, None, None


class _TableGradient(torch.autograd.Function):
    """The dense gradient of a table as a function of its vectors' gradients, linear in them."""

    @staticmethod
    def forward(ctx: FunctionContext, grad: Tensor, rows: Tensor, rows_like: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.dtype = grad.dtype
        return _table_gradient(grad, rows, rows_like, WeightGradient.DENSE)

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        return sequence_lookup(grad, rows, output_dtype=ctx.dtype), None, None


def _table_gradient(grad: Tensor, rows: Tensor, rows_like: Tensor, form: WeightGradient) -> Tensor:
    shape = torch.Size((rows_like.shape[0], grad.shape[1]))
    return table_gradient(rows, RowGradients(grad.contiguous()), shape, rows_like.dtype, form)


def sequence_lookup(
    weight: Tensor,
    rows: Tensor,
    *,
    output_dtype: torch.dtype | None = None,
    weight_form: WeightGradient = WeightGradient.DENSE,
    sink: GradientSink | None = None,
) -> Tensor:
    """Look up one vector for each id, without pooling: ``out[p] = weight[rows[p]]``.

    A row of -1 gives zeros and gets no gradient. Deterministic, never synchronizes.

    Args:
        weight: ``[R, D]``, float32, float16 or bfloat16.
        rows: ``[L]``, int32 or int64, each -1 or in ``[0, R)``; not checked.
        output_dtype: float32, float16 or bfloat16; the weight's where None.
        weight_form: form of the gradient of ``weight``.
        sink: called in backward with ``rows`` and their gradients; ``weight`` then gets none.

    Returns:
        ``[L, D]``.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit.
    """
    return _SequenceLookup.apply(
        weight.contiguous(),
        rows.contiguous(),
        weight.dtype if output_dtype is None else output_dtype,
        weight_form,
        sink,
    )
