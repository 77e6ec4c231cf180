"""Memory of the host that a GPU may read and write."""

import concurrent.futures
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_PORTABLE_AND_MAPPED = 1 | 2
_PAGE_BYTES = 4096
_PAGES_AT_ONCE = 1 << 14
"""Pages that a thread touches at a time: so few that torch starts no threads for them."""


def host_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialized tensor in the memory of the host, which kernels on ``device`` may access.

    For a GPU its pages are locked, for as long as the tensor's storage lives. On the meta device
    the tensor is there, too.

    Raises:
        RuntimeError: if the memory cannot be locked.
    """
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device="meta")
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if device.type != "cuda" or not num_bytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    # Not torch's pinned memory, which is rounded up to a power of two. numpy asks for huge pages,
    # which are there and locked in a third of the time.
    made = torch.from_numpy(np.empty(num_bytes, np.uint8)).view(dtype).view(shape)
    touch_pages(made)
    _lock(made)
    return made


def touch_pages(tensor: Tensor) -> None:
    """Have the system give a new tensor its memory now, by as many threads as it has cores, where
    locking the pages does so by one, which takes minutes for 100 GB.

    Args:
        tensor: contiguous; a byte of each of its pages becomes 0.
    """
    pages = tensor.view(-1).view(torch.uint8)[::_PAGE_BYTES]
    with concurrent.futures.ThreadPoolExecutor() as threads:
        list(threads.map(Tensor.zero_, pages.split(_PAGES_AT_ONCE)))


def _lock(tensor: Tensor) -> None:
    cudart = torch.cuda.cudart()
    assert cudart is not None
    address, num_bytes = tensor.data_ptr(), tensor.nbytes
    error = int(cudart.cudaHostRegister(address, num_bytes, _PORTABLE_AND_MAPPED))
    if error:
        raise RuntimeError(
            f"storage must fit into memory of the host that CUDA can lock, got {num_bytes} bytes "
            f"and CUDA's error {error}; raise the limit of locked memory (ulimit -l), or keep "
            "fewer rows in host memory"
        )
    weakref.finalize(tensor.untyped_storage(), cudart.cudaHostUnregister, address)
