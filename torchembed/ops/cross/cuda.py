"""The C++ library's kernels of ``low_rank_cross_*`` for GPUs of compute capability 9.0."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchembed import _native
from torchembed.core.dispatch import CudaKernel

_GPU = (9, 0)
_MOST_DEPTH, _MOST_LAYERS, _MOST_PARTS = 512, 4, 4
_SUMMED_ROWS, _PART_COLUMNS = 128, 64
_UNIT = 8
"""Of columns: 16 bytes."""
_COVERS = (
    f"16-bit numbers, a rank up to {_MOST_DEPTH} and columns by {_UNIT}, on GPUs of compute "
    "capability 9.0"
)


@functools.cache
def _runs_on(device: torch.device) -> bool:
    """As in :mod:`torchembed.ops.rowwise_update.cuda`, and of the right generation."""
    from torchembed.triton_kernels.segments import library_sort_on

    return torch.cuda.get_device_capability(device) == _GPU and library_sort_on(device) is not None


def _takes(left: Tensor, *matrices: Tensor) -> bool:
    """Whether the library takes a product with ``left`` over these matrices."""
    depth, num_columns = left.shape[1], matrices[0].shape[1]
    return (
        left.dtype in (torch.bfloat16, torch.float16)
        and left.numel() > 0
        and num_columns > 0
        and depth <= _MOST_DEPTH
        and depth % _UNIT == 0
        and num_columns % _UNIT == 0
        and all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (left, *matrices))
        and _runs_on(left.device)
    )


def _stream(tensor: Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream


def _launch_forward(x0: Tensor, h: Tensor, u: Tensor, bias: Tensor, x: Tensor) -> Any:
    """``torchembed::low_rank_cross_forward``; see
    :func:`torchembed.ops.cross.low_rank_cross_network`. Other sums in the product than Triton's."""
    if not (_takes(h, x0, u, x) and bias.is_contiguous() and bias.data_ptr() % 4 == 0):
        return NotImplemented
    with torch.cuda.device_of(x0):
        return torch.ops.torchembed_native.low_rank_cross_forward(x0, h, u, bias, x, _stream(x0))


def _launch_backward(grad: Tensor, grad_h: Tensor, v: Tensor, x0: Tensor, sums: Tensor) -> Any:
    """``torchembed::low_rank_cross_backward``."""
    from torchembed.triton_kernels.column_sums import sum_partials

    if not _takes(grad_h, grad, v, x0):
        return NotImplemented
    num_rows, num_columns = grad.shape
    partials = sums
    if sums.dim() == 1:
        num_partials = -(-num_rows // _SUMMED_ROWS)
        partials = sums.new_empty(num_partials, num_columns, dtype=torch.float32)
    with torch.cuda.device_of(grad):
        grads = torch.ops.torchembed_native.low_rank_cross_backward(
            grad, grad_h, v, x0, partials, _stream(grad)
        )
        if partials is not sums:
            sum_partials(partials, sums)
    return grads


def _launch_input_backward(
    grad_h: Tensor, v: Tensor, grads: Sequence[Tensor], z: Sequence[Tensor], widths: Sequence[int]
) -> Any:
    """``torchembed::low_rank_cross_input_backward``."""
    starts = itertools.accumulate(widths[:-1])
    if not (
        _takes(grad_h, v, *grads, *z)
        and len(z) <= _MOST_LAYERS
        and 0 < len(widths) <= _MOST_PARTS
        and min(widths) > 0
        and all(start % _PART_COLUMNS == 0 for start in starts)
    ):
        return NotImplemented
    with torch.cuda.device_of(grad_h):
        return torch.ops.torchembed_native.low_rank_cross_input_backward(
            grad_h, v, list(grads), list(z), list(widths), _stream(grad_h)
        )


def forward_kernel() -> CudaKernel | None:
    """Of ``low_rank_cross_forward``."""
    return _native.cuda_kernel("low_rank_cross_forward", _launch_forward, _COVERS)


def backward_kernel() -> CudaKernel | None:
    """Of ``low_rank_cross_backward``."""
    return _native.cuda_kernel("low_rank_cross_backward", _launch_backward, _COVERS)


def input_backward_kernel() -> CudaKernel | None:
    """Of ``low_rank_cross_input_backward``."""
    return _native.cuda_kernel("low_rank_cross_input_backward", _launch_input_backward, _COVERS)
