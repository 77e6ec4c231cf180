"""Defines the operations behind linear layers, and picks their kernels."""

import torch
from torch import Tensor

from torchembed.core.dispatch import define_op
from torchembed.ops.linear.checks import (
    check_linear_relu_backward,
    check_linear_relu_input_backward,
    check_linear_to_one_backward,
    check_linear_to_one_forward,
    check_sum_partials,
    check_sum_rows,
)
from torchembed.ops.linear.cuda import input_backward_kernel
from torchembed.ops.linear.reference import (
    linear_relu_backward_reference,
    linear_relu_input_backward_reference,
    linear_to_one_backward_reference,
    linear_to_one_forward_reference,
    sum_rows_reference,
)

_TRITON = "torchembed.triton_kernels.linear"


def _linear_relu_backward_fake(grad: Tensor, output: Tensor, sums: Tensor) -> Tensor:
    return torch.empty_like(output)


def _linear_relu_input_backward_fake(
    grad: Tensor, weight: Tensor, output: Tensor, sums: Tensor
) -> Tensor:
    return torch.empty_like(output)


def _sum_rows_fake(grad: Tensor, total: Tensor) -> None:
    return None


def _linear_to_one_forward_fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], 1)


def _linear_to_one_backward_fake(
    grad: Tensor, x: Tensor, weight: Tensor, grad_weight: Tensor, grad_bias: Tensor | None
) -> Tensor:
    return torch.empty_like(x)


linear_relu_backward_op = define_op(
    "linear_relu_backward(Tensor grad, Tensor output, Tensor(a!) sums) -> Tensor",
    reference=linear_relu_backward_reference,
    fake=_linear_relu_backward_fake,
    triton=f"{_TRITON}:launch_linear_relu_backward",
    check=check_linear_relu_backward,
)
linear_relu_input_backward_op = define_op(
    "linear_relu_input_backward(Tensor grad, Tensor weight, Tensor output, Tensor(a!) sums)"
    " -> Tensor",
    reference=linear_relu_input_backward_reference,
    fake=_linear_relu_input_backward_fake,
    triton=f"{_TRITON}:launch_linear_relu_input_backward",
    cuda=input_backward_kernel(),
    check=check_linear_relu_input_backward,
)
sum_rows_op = define_op(
    "sum_rows(Tensor grad, Tensor(a!) total) -> ()",
    reference=sum_rows_reference,
    fake=_sum_rows_fake,
    triton=f"{_TRITON}:launch_sum_rows",
    check=check_sum_rows,
)
sum_partials_op = define_op(
    "sum_partials(Tensor partials, Tensor(a!) total) -> ()",
    reference=sum_rows_reference,
    fake=_sum_rows_fake,
    triton="torchembed.triton_kernels.column_sums:sum_partials",
    check=check_sum_partials,
)
linear_to_one_forward_op = define_op(
    "linear_to_one_forward(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    reference=linear_to_one_forward_reference,
    fake=_linear_to_one_forward_fake,
    triton=f"{_TRITON}:launch_linear_to_one_forward",
    check=check_linear_to_one_forward,
)
linear_to_one_backward_op = define_op(
    "linear_to_one_backward(Tensor grad, Tensor x, Tensor weight, Tensor(a!) grad_weight,"
    " Tensor(b!)? grad_bias) -> Tensor",
    reference=linear_to_one_backward_reference,
    fake=_linear_to_one_backward_fake,
    triton=f"{_TRITON}:launch_linear_to_one_backward",
    check=check_linear_to_one_backward,
)
