"""The C++ library's kernels of ``low_rank_cross_*`` for GPUs of compute capability 9.0."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed import _native
from torchembed.core.dispatch import CudaKernel
from torchembed.ops.hopper_products import COVERS, partial_sums, stream_of, takes

_MOST_LAYERS, _MOST_PARTS, _PART_COLUMNS = 4, 4, 64


def _launch_forward(x0: Tensor, h: Tensor, u: Tensor, bias: Tensor, x: Tensor) -> object:
    """``torchembed::low_rank_cross_forward``; see
    :func:`torchembed.ops.cross.low_rank_cross_network`.

    The product is added up in another order than Triton's.
    """
    if not (takes(h, x0, u, x) and bias.is_contiguous() and bias.data_ptr() % 4 == 0):
        return NotImplemented
    with torch.cuda.device_of(x0):
        return torch.ops.torchembed_native.low_rank_cross_forward(x0, h, u, bias, x, stream_of(x0))


def _launch_backward(grad: Tensor, grad_h: Tensor, v: Tensor, x0: Tensor, sums: Tensor) -> object:
    """``torchembed::low_rank_cross_backward``."""
    if not takes(grad_h, grad, v, x0):
        return NotImplemented
    with torch.cuda.device_of(grad), partial_sums(sums, grad.shape[0]) as partials:
        return torch.ops.torchembed_native.low_rank_cross_backward(
            grad, grad_h, v, x0, partials, stream_of(grad)
        )


def _launch_input_backward(
    grad_h: Tensor, v: Tensor, grads: Sequence[Tensor], z: Sequence[Tensor], widths: Sequence[int]
) -> object:
    """``torchembed::low_rank_cross_input_backward``."""
    starts = itertools.accumulate(widths[:-1])
    if not (
        takes(grad_h, v, *grads, *z)
        and len(z) <= _MOST_LAYERS
        and 0 < len(widths) <= _MOST_PARTS
        and min(widths) > 0
        and all(start % _PART_COLUMNS == 0 for start in starts)
    ):
        return NotImplemented
    with torch.cuda.device_of(grad_h):
        return torch.ops.torchembed_native.low_rank_cross_input_backward(
            grad_h, v, list(grads), list(z), list(widths), stream_of(grad_h)
        )


def forward_kernel() -> CudaKernel | None:
    """Kernel of ``low_rank_cross_forward``; None where the library has none."""
    return _native.cuda_kernel("low_rank_cross_forward", _launch_forward, COVERS)


def backward_kernel() -> CudaKernel | None:
    """Kernel of ``low_rank_cross_backward``; None where the library has none."""
    return _native.cuda_kernel("low_rank_cross_backward", _launch_backward, COVERS)


def input_backward_kernel() -> CudaKernel | None:
    """Kernel of ``low_rank_cross_input_backward``; None where the library has none."""
    return _native.cuda_kernel("low_rank_cross_input_backward", _launch_input_backward, COVERS)
