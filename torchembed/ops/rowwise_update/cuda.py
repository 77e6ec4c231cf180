"""The C++ library's kernel of ``rowwise_update`` for GPUs."""

import functools
from typing import Any

import torch
from torch import Tensor

from torchembed import _native
from torchembed.core.dispatch import CudaKernel
from torchembed.core.types import OptimizerKind

_DIMS = (32, 64, 128)
_OLDEST_GPU = (8, 0)
_MAX_ROWS = 2**31
_COVERS = "float32 rows of 32, 64 or 128 columns by any rule but Adam"


@functools.cache
def _num_blocks(device: torch.device) -> int:
    """Five in six multiprocessors saturate the memory; the others are left to what runs beside."""
    return torch.cuda.get_device_properties(device).multi_processor_count * 5 // 6


@functools.cache
def _runs_on(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= _OLDEST_GPU


def _launch_update_rows(
    weight: Tensor,
    state0: Tensor | None,
    state1: Tensor | None,
    unique_rows: Tensor,
    starts: Tensor,
    order: Tensor,
    num_runs: Tensor,
    grad: Tensor,
    gradient_rows: Tensor | None,
    scales: Tensor | None,
    lr: Tensor,
    step: Tensor | None,
    grad_multiplier: Tensor | None,
    skip: Tensor | None,
    row_offsets: Tensor | None,
    row_keys: Tensor | None,
    first_columns: Tensor | None,
    optimizer: int,
    eps: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    max_gradient: float,
) -> Any:
    """``torchembed::rowwise_update``; see :func:`torchembed.ops.rowwise_update.rowwise_update`.

    Has the bits of the Triton kernel."""
    num_rows, dim = weight.shape
    if (
        weight.dtype != torch.float32
        or optimizer == OptimizerKind.ADAM
        or dim not in _DIMS
        or max(num_rows, grad.shape[0]) >= _MAX_ROWS
        or any(t is not None and t.data_ptr() % 16 != 0 for t in (weight, state0, grad))
        or not _runs_on(weight.device)
    ):
        return NotImplemented
    if order.numel() == 0 or weight.numel() == 0:
        return None
    with torch.cuda.device_of(weight):
        torch.ops.torchembed_native.update_rows(
            weight,
            state0,
            unique_rows,
            starts,
            order,
            num_runs,
            grad,
            gradient_rows,
            scales,
            lr,
            grad_multiplier,
            skip,
            optimizer,
            eps,
            weight_decay,
            max_gradient,
            _num_blocks(weight.device),
            0,
            torch.cuda.current_stream(weight.device).cuda_stream,
        )
    return None


def cuda_kernel() -> CudaKernel | None:
    """None where the library is not loaded or was built without CUDA."""
    if _native.load_error() is not None or not hasattr(torch.ops.torchembed_native, "update_rows"):
        return None
    return CudaKernel(_launch_update_rows, _COVERS)
