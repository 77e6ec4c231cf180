"""The launchers of ``linear_relu_backward`` and ``sum_rows``.

Byte floor: gradient and output read, the product's gradient written, once each.
"""

import torch
from torch import Tensor

from torchembed.triton_kernels.column_sums import multiply_and_sum


def launch_linear_relu_backward(grad: Tensor, output: Tensor, grad_bias: Tensor) -> Tensor:
    """``torchembed::linear_relu_backward``; see :func:`torchembed.ops.linear.linear_relu`."""
    grad_product = torch.empty_like(grad)
    multiply_and_sum(grad, output, grad_product, grad_bias, rectify=True)
    return grad_product


def launch_sum_rows(grad: Tensor, total: Tensor) -> None:
    """``torchembed::sum_rows``: ``total [N]`` becomes the sum over the rows of ``grad [B, N]``."""
    multiply_and_sum(grad, None, None, total)
