"""The C++ library's kernel of ``rowwise_update`` for GPUs."""

import functools

import torch
from torch import distributed

from torchembed import _native
from torchembed.autograd.weight_gradients import are_waiting
from torchembed.core.dispatch import CudaKernel
from torchembed.core.types import OptimizerKind
from torchembed.core.update_records import RowUpdate

_ALL_BUT_ADAM = (OptimizerKind.SGD, OptimizerKind.ADAGRAD, OptimizerKind.ROWWISE_ADAGRAD)
_RULES = {128: _ALL_BUT_ADAM}
"""Columns of a float32 row, and the rules whose updates are faster than Triton's at that width."""
_RULES_ON_HOPPER = {
    64: (OptimizerKind.SGD, OptimizerKind.ROWWISE_ADAGRAD, OptimizerKind.ADAM),
    96: tuple(OptimizerKind),
    256: (OptimizerKind.ADAGRAD, OptimizerKind.ROWWISE_ADAGRAD, OptimizerKind.ADAM),
    512: (OptimizerKind.ROWWISE_ADAGRAD,),
}
"""The same of the kernels that are compiled for one generation of GPUs alone."""
_RULES_OF_16_BITS = {
    128: _ALL_BUT_ADAM,
    256: (OptimizerKind.ADAGRAD, OptimizerKind.ROWWISE_ADAGRAD),
    512: (OptimizerKind.ROWWISE_ADAGRAD,),
}
"""The same for rows of float16 and bfloat16."""
_GRADIENTS_OF_16_BITS = (torch.float32, torch.bfloat16)
"""The gradients that such rows must have."""
_OLDEST_GPU = (8, 0)
_HOPPER = 9
"""The major version of the GPUs that these kernels are compiled for."""
_MAX_ROWS = 2**31
_COVERS = (
    "float32 rows of 128 columns, but for Adam; on Hopper those of 96, of 64, but for Adagrad, of "
    "256, but for SGD, and of 512 for row-wise Adagrad; there also 16-bit rows of 128, but for "
    "Adam, of 256 for both kinds of Adagrad, and of 512 for row-wise Adagrad, with float32 or "
    "bfloat16 gradients"
)


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _num_blocks(update: RowUpdate) -> int:
    """Blocks of the launch, one for each multiprocessor that the update takes.

    Five in six multiprocessors saturate every memory; half of them do nearly as well, and leave the
    others to matrix products for deferred gradients, which run on another stream meanwhile. The
    kernels for 16-bit rows, which compute more for each byte, and for float32 ones of 256 columns,
    which have fewer warps, need every multiprocessor. They get it where nothing else is to run
    meanwhile: no deferred gradients, and no exchange with other ranks.
    """
    weight = update.weight
    count = _num_multiprocessors(weight.device)
    is_beside_products = are_waiting()
    if weight.dtype == torch.float32 and is_beside_products:
        return count // 2
    needs_all = weight.dtype != torch.float32 or (
        weight.shape[1] == 256
        and update.optimizer == OptimizerKind.ROWWISE_ADAGRAD
        and update.grad.dtype == torch.float32
    )
    has_ranks = distributed.is_available() and distributed.is_initialized()
    is_alone = not is_beside_products and not has_ranks
    return count if needs_all and is_alone else count * 5 // 6


@functools.cache
def _runs_on(device: torch.device) -> bool:
    """True for a GPU that is new enough, where the library's sort runs too: one compiler made both
    kernels, and the driver is not older than it."""
    from torchembed.triton_kernels.sort_rows import library_sort_on

    is_new_enough = torch.cuda.get_device_capability(device) >= _OLDEST_GPU
    return is_new_enough and library_sort_on(device) is not None


def _takes(weight: torch.Tensor, grad: torch.Tensor, optimizer: int) -> bool:
    """True where there is a kernel for such rows and gradients."""
    dim, is_float32 = weight.shape[1], weight.dtype == torch.float32
    if not is_float32 and (
        weight.dtype not in (torch.float16, torch.bfloat16)
        or grad.dtype not in _GRADIENTS_OF_16_BITS
    ):
        return False
    if is_float32 and optimizer in _RULES.get(dim, ()):
        return True
    on_hopper = _RULES_ON_HOPPER if is_float32 else _RULES_OF_16_BITS
    is_hopper = torch.cuda.get_device_capability(weight.device)[0] == _HOPPER
    return is_hopper and optimizer in on_hopper.get(dim, ())


def _launch_update_rows(update: RowUpdate) -> object:
    """``torchembed::rowwise_update``; see :func:`torchembed.ops.rowwise_update.rowwise_update`.

    The bits are those of the Triton kernel, which is slower for the calls that this one takes.
    """
    weight, grad = update.weight, update.grad
    num_rows = weight.shape[0]
    states = [state for state in (update.state0, update.state1) if state is not None]
    if (
        not _takes(weight, grad, update.optimizer)
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
            update.step,
            update.grad_multiplier,
            update.skip,
            update.row_offsets,
            update.row_keys,
            update.first_columns,
            update.optimizer,
            update.eps,
            1 - update.beta1,
            1 - update.beta2,
            update.weight_decay,
            update.max_gradient,
            _num_blocks(update),
            torch.cuda.current_stream(weight.device).cuda_stream,
        )
    return None


def cuda_kernel() -> CudaKernel | None:
    """The kernel; None where the library is not loaded or was built without CUDA."""
    return _native.cuda_kernel("update_rows", _launch_update_rows, _COVERS)
