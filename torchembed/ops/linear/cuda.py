"""The C++ library's kernel of ``linear_relu_input_backward`` for GPUs of compute capability 9.0."""

import torch
from torch import Tensor

from torchembed import _native
from torchembed.core.dispatch import CudaKernel
from torchembed.ops.hopper_products import COVERS, partial_sums, stream_of, takes


def _launch_input_backward(grad: Tensor, weight: Tensor, output: Tensor, sums: Tensor) -> object:
    """``torchembed::linear_relu_input_backward``; see
    :func:`torchembed.ops.linear.linear_relu_stack`.

    The product is added up in another order than cuBLAS's.
    """
    if not takes(grad, weight, output):
        return NotImplemented
    with torch.cuda.device_of(grad), partial_sums(sums, grad.shape[0]) as partials:
        return torch.ops.torchembed_native.linear_relu_input_backward(
            grad, weight, output, partials, stream_of(grad)
        )


def input_backward_kernel() -> CudaKernel | None:
    """The kernel; None where the library is not loaded or was built without CUDA."""
    return _native.cuda_kernel("linear_relu_input_backward", _launch_input_backward, COVERS)
