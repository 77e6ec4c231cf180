"""The specification of ``linear_relu_backward`` and ``sum_rows`` in eager torch."""

import torch
from torch import Tensor


def linear_relu_backward_reference(grad: Tensor, output: Tensor, grad_bias: Tensor) -> Tensor:
    grad_product = torch.where(output > 0, grad, 0)
    sum_rows_reference(grad_product, grad_bias)
    return grad_product


def sum_rows_reference(grad: Tensor, total: Tensor) -> None:
    total.copy_(grad.sum(0, dtype=torch.float32))
