"""What the C++ library's matrix products for GPUs of compute capability 9.0 have in common."""

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from torchembed.core.types import ROWS_OF_PARTIAL

_GPU = (9, 0)
_MOST_DEPTH = 512
_UNIT = 8
"""Of depth and columns: 16 bytes."""
COVERS = (
    f"16-bit numbers, a depth up to {_MOST_DEPTH}, depth and columns by {_UNIT}, on GPUs of "
    "compute capability 9.0"
)


@functools.cache
def _runs_on(device: torch.device) -> bool:
    """As in :mod:`torchembed.ops.rowwise_update.cuda`, and of the right generation."""
    from torchembed.triton_kernels.segments import library_sort_on

    return torch.cuda.get_device_capability(device) == _GPU and library_sort_on(device) is not None


def takes(left: Tensor, *matrices: Tensor) -> bool:
    """Whether the library takes a product with ``left [B, depth]`` that has the columns of
    ``matrices``: its other factor, and what its epilogue reads."""
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
    """The current stream of its device, as the library takes it."""
    return torch.cuda.current_stream(tensor.device).cuda_stream


@contextlib.contextmanager
def partial_sums(sums: Tensor, num_rows: int) -> Iterator[Tensor]:
    """Where a product puts float32 sums over 128 rows each: ``sums`` itself where it is ``[P, N]``;
    else memory that is added up into ``sums [N]`` on leaving."""
    from torchembed.triton_kernels.column_sums import sum_partials

    if sums.dim() == 2:
        yield sums
        return
    num_partials = -(-num_rows // ROWS_OF_PARTIAL)
    partials = sums.new_empty(num_partials, sums.shape[0], dtype=torch.float32)
    yield partials
    sum_partials(partials, sums)
