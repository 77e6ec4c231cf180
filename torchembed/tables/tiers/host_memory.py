"""Memory of the host that a GPU may read and write."""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

_PORTABLE_AND_MAPPED = 1 | 2


def host_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialized tensor in the memory of the host, which kernels on ``device`` may access.

    For a GPU its pages are locked, for as long as the tensor's storage lives. On the meta device
    the tensor is there, too.

    Raises:
        RuntimeError: where the memory cannot be locked.
    """
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device="meta")
    # Not torch's pinned memory, which is rounded up to a power of two.
    made = torch.empty(shape, dtype=dtype, device="cpu")
    if device.type == "cuda" and made.nbytes:
        _lock(made)
    return made


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
