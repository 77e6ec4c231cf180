"""Defines ``torchembed::linear_relu_backward`` and ``sum_rows``, and picks their kernels."""

import torch
from torch import Tensor

from torchembed.core.dispatch import define_op
from torchembed.ops.linear.reference import linear_relu_backward_reference, sum_rows_reference

_TRITON = "torchembed.triton_kernels.linear"


def _linear_relu_backward_fake(grad: Tensor, output: Tensor, grad_bias: Tensor) -> Tensor:
    return torch.empty_like(grad)


def _sum_rows_fake(grad: Tensor, total: Tensor) -> None:
    return None


linear_relu_backward_op = define_op(
    "linear_relu_backward(Tensor grad, Tensor output, Tensor(a!) grad_bias) -> Tensor",
    reference=linear_relu_backward_reference,
    fake=_linear_relu_backward_fake,
    triton=f"{_TRITON}:launch_linear_relu_backward",
)
sum_rows_op = define_op(
    "sum_rows(Tensor grad, Tensor(a!) total) -> ()",
    reference=sum_rows_reference,
    fake=_sum_rows_fake,
    triton=f"{_TRITON}:launch_sum_rows",
)
