"""The Triton kernels of ``dense_update``.

Byte floor for an element: its gradient and rounded copy, and 8 bytes for the weight and for each
state, read and written; Adagrad with bfloat16 gradients and copies moves 20.
"""

import math

import torch
import triton
import triton.language as tl

from torchembed.core.types import OptimizerKind
from torchembed.core.update_records import DenseUpdate
from torchembed.triton_kernels.rounding import as_float32, round_to_nearest
from torchembed.triton_kernels.row_blocks import index_type

_SGD = tl.constexpr(int(OptimizerKind.SGD))
_ADAGRAD = tl.constexpr(int(OptimizerKind.ADAGRAD))

# Each thread of 4 warps holds 8 elements: one access of 16 bytes to a 16-bit tensor.
_BLOCK = 1024
# Most parts of one launch: a kernel is compiled for each number of parts.
_MOST_PARTS = 8


@triton.jit
def _dense_update_adam_scales_kernel(
    scales_ptr, lr_ptr, step_ptr, LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr
):
    """``lr / (1 - beta1**step)`` and ``sqrt(1 - beta2**step)``, computed in float64.

    Example: lr 1, step 1, beta1 0 and beta2 3/4 give 1 and 1/2.
    """
    # In float64, since powers of a beta near 1 lose their digits in float32; and in a kernel of its
    # own, since float64 in every program would be slow.
    count = tl.load(step_ptr).to(tl.float64)
    correction1 = 1.0 - tl.exp(count * LOG_BETA1)
    correction2 = 1.0 - tl.exp(count * LOG_BETA2)
    step_size = tl.load(lr_ptr).to(tl.float64) / correction1
    tl.store(scales_ptr, step_size.to(tl.float32))
    tl.store(scales_ptr + 1, tl.sqrt(correction2).to(tl.float32))


@triton.jit
def _dense_update_kernel(
    weight_ptr,
    state0_ptr,
    state1_ptr,
    rounded_ptr,
    grad_ptr,
    scales_ptr,
    grad_multiplier_ptr,
    skip_ptr,
    parts,
    eps,
    one_minus_beta1,
    one_minus_beta2,
    weight_decay,
    OPTIMIZER: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    ENDS_ALIGNED: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update of one element in each lane by :class:`torchembed.ops.dense_update.DenseRule`.

    Each of the ``parts`` has blocks of its own. They begin at multiples of 8, and under
    ENDS_ALIGNED end there. ``scales`` is the learning rate or, under Adam, the result of
    :func:`_dense_update_adam_scales_kernel`.

    Example: SGD with lr 2, ``weight = [10]``, ``grad = [3]``: ``weight = [10 - 2 * 3] = [4]``.
    """
    if skip_ptr is not None:
        if tl.load(skip_ptr) != 0.0:
            return
    # Finds the part that this program's block is in. The parts are arguments, not a tensor: a step
    # needs no copy to the device, and the search unrolls to a few comparisons.
    block = tl.program_id(0)
    first, stop = tl.zeros([], INDEX), tl.zeros([], INDEX)
    before = 0
    for number in tl.static_range(len(parts)):
        part_start, part_stop = parts[number]
        num_blocks = tl.cdiv(part_stop - part_start, BLOCK)
        is_here = (block >= before) & (block < before + num_blocks)
        first = tl.where(is_here, part_start + (block - before).to(INDEX) * BLOCK, first)
        stop = tl.where(is_here, part_stop, stop)
        before += num_blocks
    # Parts begin at multiples of 8; told so, the compiler reads 16 bytes at once.
    at = tl.multiple_of(first, 8) + tl.arange(0, BLOCK)
    mask = at < (tl.multiple_of(stop, 8) if ENDS_ALIGNED else stop)
    gradient = as_float32(tl.load(grad_ptr + at, mask=mask, other=0.0))
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0)
    lr = tl.load(scales_ptr)
    if grad_multiplier_ptr is not None:
        gradient *= tl.load(grad_multiplier_ptr)
    if HAS_DECAY:
        gradient += weight_decay * weight
    if OPTIMIZER == _SGD:
        weight -= lr * gradient
    elif OPTIMIZER == _ADAGRAD:
        # Lanes past the end get a state of 1, so that they divide by no zero.
        total = tl.load(state0_ptr + at, mask=mask, other=1.0) + gradient * gradient
        tl.store(state0_ptr + at, total, mask=mask)
        weight -= lr * tl.div_rn(gradient, tl.sqrt_rn(total) + eps)
    else:
        mean = tl.load(state0_ptr + at, mask=mask, other=0.0)
        square = tl.load(state1_ptr + at, mask=mask, other=1.0)
        mean += (gradient - mean) * one_minus_beta1
        square += (gradient * gradient - square) * one_minus_beta2
        tl.store(state0_ptr + at, mean, mask=mask)
        tl.store(state1_ptr + at, square, mask=mask)
        root = tl.div_rn(tl.sqrt_rn(square), tl.load(scales_ptr + 1))
        weight -= lr * tl.div_rn(mean, root + eps)
    tl.store(weight_ptr + at, weight, mask=mask)
    if rounded_ptr is not None:
        rounded = round_to_nearest(weight, rounded_ptr.dtype.element_ty)
        tl.store(rounded_ptr + at, rounded, mask=mask)


def launch_dense_update(update: DenseUpdate) -> None:
    """``torchembed::dense_update``; see :func:`torchembed.ops.dense_update.dense_update`."""
    parts = [(start, stop) for start, stop in update.parts() if start < stop]
    if not parts:
        return
    weight = update.weight
    with torch.cuda.device_of(weight):
        scales = update.lr
        if update.optimizer == OptimizerKind.ADAM:
            scales = torch.empty(2, device=weight.device, dtype=torch.float32)
            _dense_update_adam_scales_kernel[(1,)](
                scales,
                update.lr,
                update.step,
                LOG_BETA1=_log(update.beta1),
                LOG_BETA2=_log(update.beta2),
                num_warps=1,
            )
        for first in range(0, len(parts), _MOST_PARTS):
            some = tuple(parts[first : first + _MOST_PARTS])
            # Without fused multiply-adds the update has the bits of the reference.
            _dense_update_kernel[(sum(triton.cdiv(stop - start, _BLOCK) for start, stop in some),)](
                weight,
                update.state0,
                update.state1,
                update.rounded,
                update.grad,
                scales,
                update.grad_multiplier,
                update.skip,
                some,
                update.eps,
                1 - update.beta1,
                1 - update.beta2,
                update.weight_decay,
                OPTIMIZER=update.optimizer,
                HAS_DECAY=update.weight_decay != 0,
                ENDS_ALIGNED=all(stop % 8 == 0 for _, stop in some),
                INDEX=index_type(weight),
                BLOCK=_BLOCK,
                num_warps=4,
                enable_fp_fusion=False,
            )


def _log(beta: float) -> float:
    """The logarithm of ``beta``, by which a kernel takes its powers; -inf for 0."""
    return math.log(beta) if beta else -math.inf
