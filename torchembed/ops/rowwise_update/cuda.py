"""The C++ library's kernel of ``rowwise_update`` for GPUs."""

import functools

import torch

from torchembed import _native
from torchembed.autograd.weight_gradients import are_waiting
from torchembed.core.dispatch import CudaKernel
from torchembed.core.types import OptimizerKind
from torchembed.core.update_records import RowUpdate

_RULES = {
    128: (OptimizerKind.SGD, OptimizerKind.ADAGRAD, OptimizerKind.ROWWISE_ADAGRAD),
    256: (OptimizerKind.ADAGRAD, OptimizerKind.ROWWISE_ADAGRAD, OptimizerKind.ADAM),
    512: (OptimizerKind.ROWWISE_ADAGRAD,),
}
"""Columns of a row, and the rules whose updates are faster than Triton's at that width."""
_WIDEST_OF_ALL = 128
"""The most columns for which there are kernels for every GPU that is new enough."""
_OLDEST_GPU = (8, 0)
_WIDE_GENERATION = 9
"""The major version of the GPUs that kernels of wide rows are compiled for."""
_MAX_ROWS = 2**31
_COVERS = (
    "float32 rows of 128 columns, but for Adam, and on Hopper of 256, but for SGD, and of 512 for "
    "row-wise Adagrad"
)


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _num_blocks(device: torch.device) -> int:
    """Blocks of the launch, one for each multiprocessor that the update takes.

    Five in six multiprocessors saturate every memory; half of them do nearly as well, and leave the
    others to matrix products for deferred gradients, which run on another stream meanwhile.
    """
    count = _num_multiprocessors(device)
    return count // 2 if are_waiting() else count * 5 // 6


@functools.cache
def _runs_on(device: torch.device) -> bool:
    """True for a GPU that is new enough, where the library's sort runs too: one compiler made both
    kernels, and the driver is not older than it."""
    from torchembed.triton_kernels.segments import library_sort_on

    is_new_enough = torch.cuda.get_device_capability(device) >= _OLDEST_GPU
    return is_new_enough and library_sort_on(device) is not None


def _takes(dim: int, optimizer: int, device: torch.device) -> bool:
    """True where there is a kernel for rows of ``dim`` columns."""
    if dim > _WIDEST_OF_ALL and torch.cuda.get_device_capability(device)[0] != _WIDE_GENERATION:
        return False
    return optimizer in _RULES.get(dim, ())


def _launch_update_rows(update: RowUpdate) -> object:
    """``torchembed::rowwise_update``; see :func:`torchembed.ops.rowwise_update.rowwise_update`.

    The bits are those of the Triton kernel, which is slower for the calls that this one takes.
    """
    weight, grad = update.weight, update.grad
    num_rows, dim = weight.shape
    states = [state for state in (update.state0, update.state1) if state is not None]
    if (
        weight.dtype != torch.float32
        or not _takes(dim, update.optimizer, weight.device)
        or max(num_rows, grad.shape[0]) >= _MAX_ROWS
        # The kernel reads and writes matrices 16 bytes at a time.
        or any(rows.data_ptr() % 16 != 0 for rows in (weight, grad, *states) if rows.dim() == 2)
        or not _runs_on(weight.device)
    ):
        return NotImplemented
    if update.order.numel() == 0 or num_rows == 0:
        return None
    lr = update.lr
    if update.optimizer == OptimizerKind.ADAM:
        from torchembed.triton_kernels.rowwise_update import step_size

        lr = step_size(update)
    with torch.cuda.device_of(weight):
        torch.ops.torchembed_native.update_rows(
            weight,
            update.state0,
            update.state1,
            update.unique_rows,
            update.starts,
            update.order,
            update.num_runs,
            update.chunk_runs,
            grad,
            update.gradient_rows,
            update.scales,
            lr,
            update.grad_multiplier,
            update.skip,
            update.optimizer,
            update.eps,
            1 - update.beta1,
            1 - update.beta2,
            update.weight_decay,
            update.max_gradient,
            _num_blocks(weight.device),
            torch.cuda.current_stream(weight.device).cuda_stream,
        )
    return None


def cuda_kernel() -> CudaKernel | None:
    """The kernel; None where the library is not loaded or was built without CUDA."""
    return _native.cuda_kernel("update_rows", _launch_update_rows, _COVERS)
