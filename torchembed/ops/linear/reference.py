"""The specification of the operations behind linear layers in eager torch."""

import torch
from torch import Tensor

from torchembed.core.types import ROWS_OF_PARTIAL


def linear_relu_backward_reference(grad: Tensor, output: Tensor, sums: Tensor) -> Tensor:
    grad_product = torch.where(output > 0, grad, 0)
    put_sums_reference(grad_product.float(), sums)
    return grad_product


def linear_relu_input_backward_reference(
    grad: Tensor, weight: Tensor, output: Tensor, sums: Tensor
) -> Tensor:
    return linear_relu_backward_reference(grad @ weight, output, sums)


def put_sums_reference(grad: Tensor, sums: Tensor) -> None:
    """Write the sum over all rows of float32 ``grad`` to ``sums [N]``; or that over the p-th 128
    rows to row p of ``sums [P, N]``."""
    if sums.dim() == 1:
        sums.copy_(grad.sum(0))
        return
    num_whole = len(grad) // ROWS_OF_PARTIAL
    whole, rest = grad.tensor_split([num_whole * ROWS_OF_PARTIAL])
    sums[:num_whole] = whole.unflatten(0, (num_whole, ROWS_OF_PARTIAL)).sum(1)
    sums[num_whole:] = rest.sum(0)  # where there is a rest, whose sum is the last row


def sum_rows_reference(grad: Tensor, total: Tensor) -> None:
    total.copy_(grad.sum(0, dtype=torch.float32))


def linear_to_one_forward_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.float() @ weight.float().t()
    return (out if bias is None else out + bias.float()).to(x.dtype)


def linear_to_one_backward_reference(
    grad: Tensor, x: Tensor, weight: Tensor, grad_weight: Tensor, grad_bias: Tensor | None
) -> Tensor:
    grad_weight.copy_(grad.float().t() @ x.float())
    if grad_bias is not None:
        sum_rows_reference(grad, grad_bias)
    return (grad.float() * weight.float()).to(x.dtype)
