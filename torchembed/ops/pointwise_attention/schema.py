"""Defines the ``torchembed::pointwise_attention_*`` operations and picks their kernels."""

import torch
from torch import Tensor

from torchembed.core.dispatch import define_op
from torchembed.ops.pointwise_attention.checks import (
    check_pointwise_attention_backward,
    check_pointwise_attention_backward_contents,
    check_pointwise_attention_forward,
    check_pointwise_attention_forward_contents,
)
from torchembed.ops.pointwise_attention.reference import (
    pointwise_attention_backward_reference,
    pointwise_attention_forward_reference,
)

_TRITON = "torchembed.triton_kernels.pointwise_attention"
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor offsets, Tensor distance_bias, "
    "Tensor? time_bias, Tensor? times, Tensor? next_times"
)


def _forward_fake(query: Tensor, *others: Tensor | None) -> Tensor:
    return query.new_empty(query.shape)


def _backward_fake(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    distance_bias: Tensor,
    time_bias: Tensor | None,
    times: Tensor | None,
    next_times: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        query.new_empty(query.shape),
        query.new_empty(query.shape),
        query.new_empty(query.shape),
        torch.empty_like(distance_bias),
        query.new_empty(0) if time_bias is None else torch.empty_like(time_bias),
    )


pointwise_attention_forward_op = define_op(
    f"pointwise_attention_forward({_ARGUMENTS}) -> Tensor",
    reference=pointwise_attention_forward_reference,
    fake=_forward_fake,
    triton=f"{_TRITON}:launch_pointwise_attention_forward",
    check=check_pointwise_attention_forward,
    check_contents=check_pointwise_attention_forward_contents,
)
pointwise_attention_backward_op = define_op(
    f"pointwise_attention_backward(Tensor grad, {_ARGUMENTS}) -> "
    "(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_distance_bias, "
    "Tensor grad_time_bias)",
    reference=pointwise_attention_backward_reference,
    fake=_backward_fake,
    triton=f"{_TRITON}:launch_pointwise_attention_backward",
    check=check_pointwise_attention_backward,
    check_contents=check_pointwise_attention_backward_contents,
)
