"""The C++ library's kernel of ``rowwise_update`` for GPUs."""

import functools
from typing import Any

import torch
from torch import Tensor

from torchembed import _native
from torchembed.autograd.weight_gradients import are_waiting
from torchembed.core.dispatch import CudaKernel
from torchembed.core.types import OptimizerKind

_DIM = 128
_OLDEST_GPU = (8, 0)
_MAX_ROWS = 2**31
_KINDS = (OptimizerKind.ADAGRAD, OptimizerKind.ROWWISE_ADAGRAD)
_COVERS = f"Adagrad and row-wise Adagrad of float32 rows of {_DIM} columns"


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _num_blocks(device: torch.device) -> int:
    """Five in six multiprocessors saturate every memory; half of them do nearly as well, and leave
    room to the products that gradients of weights wait for."""
    count = _num_multiprocessors(device)
    return count // 2 if are_waiting() else count * 5 // 6


@functools.cache
def _runs_on(device: torch.device) -> bool:
    """Where the library's sort does, too: the driver is not older than the compiler of both."""
    from torchembed.triton_kernels.segments import library_sort_on

    is_new_enough = torch.cuda.get_device_capability(device) >= _OLDEST_GPU
    return is_new_enough and library_sort_on(device) is not None


def _launch_update_rows(
    weight: Tensor,
    state0: Tensor | None,
    state1: Tensor | None,
    unique_rows: Tensor,
    starts: Tensor,
    order: Tensor,
    num_runs: Tensor,
    chunk_runs: Tensor,
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

    The bits are those of the Triton kernel, which is slower for what this one takes.
    """
    num_rows, dim = weight.shape
    if (
        state0 is None
        or optimizer not in _KINDS
        or weight.dtype != torch.float32
        or dim != _DIM
        or max(num_rows, grad.shape[0]) >= _MAX_ROWS
        or any(rows.data_ptr() % 16 != 0 for rows in (weight, grad, state0) if rows.dim() == 2)
        or not _runs_on(weight.device)
    ):
        return NotImplemented
    if order.numel() == 0 or num_rows == 0:
        return None
    with torch.cuda.device_of(weight):
        torch.ops.torchembed_native.update_rows(
            weight,
            state0,
            unique_rows,
            starts,
            order,
            num_runs,
            chunk_runs,
            grad,
            gradient_rows,
            scales,
            lr,
            grad_multiplier,
            skip,
            eps,
            weight_decay,
            max_gradient,
            _num_blocks(weight.device),
            torch.cuda.current_stream(weight.device).cuda_stream,
        )
    return None


def cuda_kernel() -> CudaKernel | None:
    """None where the library is not loaded or was built without CUDA."""
    return _native.cuda_kernel("update_rows", _launch_update_rows, _COVERS)
