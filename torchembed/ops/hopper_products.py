"""Conditions and arguments that all of the C++ library's matrix products for GPUs of compute
capability 9.0 share."""

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from torchembed.core.types import ROWS_OF_PARTIAL

_GPU = (9, 0)
_MOST_DEPTH = 512
_UNIT = 8
"""Divisor of depth and columns: 16 bytes of 16-bit numbers, the unit of bulk tensor copies."""
COVERS = (
    f"16-bit numbers, a depth up to {_MOST_DEPTH}, depth and columns by {_UNIT}, on GPUs of "
    "compute capability 9.0"
)


@functools.cache
def _runs_on(device: torch.device) -> bool:
    """True for a GPU of the right generation with a driver that runs the library's kernels."""
    from torchembed.triton_kernels.sort_rows import library_sort_on

    return torch.cuda.get_device_capability(device) == _GPU and library_sort_on(device) is not None


def takes(left: Tensor, *matrices: Tensor) -> bool:
    """True where the library has a kernel for the product of ``left [B, depth]``.

    Args:
        left: left factor.
        matrices: the right factor, and what the epilogue reads, all with the product's columns.
    """
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


def stream_of(tensor: Tensor) -> int:
    """The handle of the current stream on the device of ``tensor``, as the library takes it."""
    return torch.cuda.current_stream(tensor.device).cuda_stream


@contextlib.contextmanager
def partial_sums(sums: Tensor, num_rows: int) -> Iterator[Tensor]:
    """Float32 memory ``[P, N]`` for a product's sums over 128 rows each.

    That is ``sums`` itself where it is ``[P, N]``; else new memory, whose rows are added up into
    ``sums [N]`` on leaving.
    """
    from torchembed.triton_kernels.column_sums import sum_partials

    if sums.dim() == 2:
        yield sums
        return
    num_partials = -(-num_rows // ROWS_OF_PARTIAL)
    partials = sums.new_empty(num_partials, sums.shape[0], dtype=torch.float32)
    yield partials
    sum_partials(partials, sums)
