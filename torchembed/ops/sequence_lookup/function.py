"""The public function ``sequence_lookup`` and its gradient."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchembed.core.function_context import FunctionContext
from torchembed.ops.row_gradients import GradientSink, WeightGradient, table_gradient
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
    @once_differentiable
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, rows_like = ctx.saved_tensors
        gradients = RowGradients(grad.contiguous())
        grad_weight = None
        if ctx.sink is not None:
            ctx.sink(rows, gradients)
        else:
            shape = torch.Size((rows_like.shape[0], grad.shape[1]))
            grad_weight = table_gradient(rows, gradients, shape, rows_like.dtype, ctx.form)
        return grad_weight, None, None, None, None


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
