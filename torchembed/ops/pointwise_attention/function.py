"""The public function ``pointwise_attention``."""

import torch
from torch import Tensor

from torchembed.autograd.first_order import first_order
from torchembed.core.function_context import FunctionContext
from torchembed.ops.pointwise_attention.reference import pointwise_attention_forward_reference
from torchembed.ops.pointwise_attention.schema import (
    pointwise_attention_backward_op,
    pointwise_attention_forward_op,
)


class _PointwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionContext,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        offsets: Tensor,
        distance_bias: Tensor,
        time_bias: Tensor | None,
        times: Tensor | None,
        next_times: Tensor | None,
    ) -> Tensor:
        tensors = (query, key, value, offsets, distance_bias, time_bias, times, next_times)
        ctx.save_for_backward(*tensors)
        return pointwise_attention_forward_op(*tensors)

    @staticmethod
    @first_order("torchembed's pointwise attention", "torch's own operations")
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        *grads, grad_distance_bias, grad_time_bias = pointwise_attention_backward_op(
            grad.contiguous(), *ctx.saved_tensors
        )
        of_times = None if ctx.saved_tensors[5] is None else grad_time_bias
        return *grads, None, grad_distance_bias, of_times, None, None


def pointwise_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    distance_bias: Tensor,
    *,
    time_bias: Tensor | None = None,
    times: Tensor | None = None,
    next_times: Tensor | None = None,
) -> Tensor:
    """Causal attention within packed histories, whose weights are pointwise, without a softmax.

    Row i of a history becomes ``sum(silu(query[i] . key[j] + bias[i, j]) * value[j]) /
    max_length`` over its rows j from the first to i. The bias is ``distance_bias[i - j]``, and with
    times ``time_bias[bucket]`` is added: the bucket of ``max(|next_times[i] - times[j]|, 1)``
    seconds t is ``floor(log(t) / 0.301)``, or the last one. J. Zhai et al., "Actions Speak Louder
    than Words: Trillion-Parameter Sequential Transducers for Generative Recommendations", ICML
    2024, whose code has these buckets.

    The first ``max_length`` rows of each history count. Rows behind these, and those behind the
    last history, give zeros and get zero gradients. Products are added up in float32; of float32
    they are computed as ``torch.backends.cuda.matmul.fp32_precision`` allows on a GPU. Weights of
    attention and gradients of scores are rounded to the type of the rows. The Triton kernels hold
    scores in registers and compute them again in backward, which reads the arguments: changing
    these in between is an error. Deterministic. Never synchronizes.

    Args:
        query: ``[L, H, D]``, float32, float16 or bfloat16, D of 512 at most; rows may have gaps
            between them.
        key: of that shape and type.
        value: likewise.
        offsets: ``[B + 1]``, int32 or int64: where histories begin and end; from 0 on, not
            decreasing, up to L at most, which is not checked.
        distance_bias: ``[max_length]``, float32, float16 or bfloat16: of a row on itself, on the
            row before it, and so on.
        time_bias: ``[num_buckets]``, of one of these types; None where there are no times.
        times: int64 ``[L]``, in seconds; given where ``time_bias`` is.
        next_times: likewise: the time of the request that follows each row.

    Returns:
        ``[L, H, D]``, in the type of ``query``.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit.
    """
    others = (time_bias, times, next_times)
    query, key, value = (_with_whole_rows(rows) for rows in (query, key, value))
    if torch.compiler._is_exporting_flag:
        # In operations that other runtimes have.
        return pointwise_attention_forward_reference(
            query, key, value, offsets, distance_bias, *others
        )
    return _PointwiseAttention.apply(query, key, value, offsets, distance_bias, *others)


def _with_whole_rows(rows: Tensor) -> Tensor:
    """``rows``, or a copy where they are not contiguous one by one, or overlap."""
    is_apart = rows.stride(0) >= rows.shape[1:].numel()
    return rows if is_apart and rows[:1].is_contiguous() else rows.contiguous()
