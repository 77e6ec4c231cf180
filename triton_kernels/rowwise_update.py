"""The Triton kernels of ``rowwise_update``.

A run is cut into chunks of CHUNK occurrences and a rest. The chunks are summed first, side by
side, into a scratch of static size; the update then adds a run's few chunks and its rest. So a row
that occurs 100,000 times is not one program's work, sums do not depend on the rest of the batch,
and the order of every sum is fixed.

Byte floor, for L occurrences of U rows: ``L * (4 + gradient row index + scale)``, the gradient rows
that the batch has (each read once, as far as the cache reaches), and ``2 * U * D * (weight bytes +
4 * states)`` for rows and their state, read and written.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.core.types import OptimizerKind
from torchembed.triton_kernels.random_bits import random_bits
from torchembed.triton_kernels.rounding import round_to_nearest, stochastic_round
from torchembed.triton_kernels.row_blocks import (
    NUM_WARPS,
    index_type,
    load_rows,
    row_block,
    store_rows,
)
from torchembed.triton_kernels.searching import count_not_above

_SGD = tl.constexpr(int(OptimizerKind.SGD))
_ADAGRAD = tl.constexpr(int(OptimizerKind.ADAGRAD))
_ROWWISE_ADAGRAD = tl.constexpr(int(OptimizerKind.ROWWISE_ADAGRAD))

CHUNK = 128
_UNROLL = 4
_BLOCK = 128


@triton.jit
def _sum_occurrences(
    start,
    length,
    order_ptr,
    grad_ptr,
    gradient_rows_ptr,
    scales_ptr,
    columns,
    DIM: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Float32 ``[BLOCK_RUNS, BLOCK_D]``: gradients of the sorted positions from ``start`` on,
    ``length`` of them, added in their order; UNROLL rows are in flight together."""
    total = tl.zeros([BLOCK_RUNS, BLOCK_D], tl.float32)
    for first in range(0, tl.max(length, axis=0), UNROLL):
        for step in tl.static_range(UNROLL):
            inside = first + step < length
            position = tl.load(order_ptr + start + first + step, mask=inside, other=0)
            gradient_row = position
            if gradient_rows_ptr is not None:
                gradient_row = tl.load(gradient_rows_ptr + position, mask=inside, other=0)
            gradients = load_rows(grad_ptr, gradient_row, inside, columns, DIM, INDEX)
            if scales_ptr is not None:
                gradients *= tl.load(scales_ptr + position, mask=inside, other=0.0)[:, None]
            total += gradients
    return total


@triton.jit
def _rowwise_update_find_chunks_kernel(
    chunk_starts_ptr,
    starts_ptr,
    num_runs_ptr,
    num_slots,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    INDEX: tl.constexpr,
):
    """``chunk_starts[j]`` = start of the whole chunk that starts in sorted positions
    ``[j * CHUNK, (j + 1) * CHUNK)``, -1 where none does.

    Chunks start at ``starts[u] + k * CHUNK``, so no two of them share a slot j; and a chunk of
    slot j holds the slot's last position, which tells its run.

    Example: CHUNK = 2, ``starts = [1, 6, 7]``: run 0 has the chunks [1, 3) and [3, 5) and a rest of
    one, run 1 is a rest alone. ``chunk_starts = [1, 3, -1]``.
    """
    slot = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    last = slot * CHUNK + (CHUNK - 1)
    run = count_not_above(starts_ptr, tl.load(num_runs_ptr), last, 1, 1) - 1
    in_run = (slot < num_slots) & (run >= 0)
    run_start = tl.load(starts_ptr + run, mask=in_run, other=0).to(INDEX)
    run_end = tl.load(starts_ptr + run + 1, mask=in_run, other=0).to(INDEX)
    start = run_start + (last - run_start) // CHUNK * CHUNK
    is_whole = in_run & (start + CHUNK <= run_end)
    found = tl.where(is_whole, start, -1).to(tl.int32)
    tl.store(chunk_starts_ptr + slot, found, mask=slot < num_slots)


@triton.jit
def _rowwise_update_chunks_kernel(
    chunk_sums_ptr,
    chunk_starts_ptr,
    order_ptr,
    grad_ptr,
    gradient_rows_ptr,
    scales_ptr,
    num_slots,
    CHUNK: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
    INDEX: tl.constexpr,
):
    """``chunk_sums[j]`` = sum of the CHUNK gradients from sorted position ``chunk_starts[j]`` on.

    Example: CHUNK = 2, D = 1, gradients 1 2 3 4 5 6 7 in sorted order and
    ``chunk_starts = [1, 3, -1]``: slot 0 holds 2 + 3, slot 1 holds 4 + 5, slot 2 stays as it was.
    """
    slot = tl.program_id(0).to(INDEX) * BLOCK_SLOTS + tl.arange(0, BLOCK_SLOTS)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    start = tl.load(chunk_starts_ptr + slot, mask=slot < num_slots, other=-1).to(INDEX)
    is_whole = start >= 0
    total = _sum_occurrences(
        start,
        tl.where(is_whole, CHUNK, 0),
        order_ptr,
        grad_ptr,
        gradient_rows_ptr,
        scales_ptr,
        columns,
        DIM,
        BLOCK_SLOTS,
        BLOCK_D,
        UNROLL,
        INDEX,
    )
    store_rows(chunk_sums_ptr, slot, is_whole, columns, total, DIM, INDEX)


@triton.jit
def _rowwise_update_adam_step_kernel(
    step_size_ptr, lr_ptr, step_ptr, LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr
):
    """``lr * sqrt(1 - beta2**step) / (1 - beta1**step)``, computed in float64.

    Example: lr 1, step 1, beta1 0 and beta2 3/4 give ``sqrt(1/4) / 1 = 1/2``.
    """
    count = tl.load(step_ptr).to(tl.float64)
    correction1 = 1.0 - tl.exp(count * LOG_BETA1)
    correction2 = 1.0 - tl.exp(count * LOG_BETA2)
    step_size = tl.load(lr_ptr).to(tl.float64) * tl.sqrt(correction2) / correction1
    tl.store(step_size_ptr, step_size.to(tl.float32))


@triton.jit
def _rounding_bits(row, columns, row_offsets_ptr, row_keys_ptr, num_tables, step):
    """64 random bits for each element, a function of table, row, step and column alone."""
    table = count_not_above(row_offsets_ptr, num_tables, row, 1, 1) - 1
    row_key = random_bits(tl.load(row_keys_ptr + table), row)
    step_key = random_bits(row_key, step.to(tl.int64))
    return random_bits(step_key[:, None], columns[None, :])


@triton.jit
def _run_gradients(
    start,
    length,
    chunk_sums_ptr,
    order_ptr,
    grad_ptr,
    gradient_rows_ptr,
    scales_ptr,
    grad_multiplier_ptr,
    max_gradient,
    columns,
    HAS_MAX: tl.constexpr,
    CHUNK: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Float32 ``[BLOCK_RUNS, BLOCK_D]``: the gradient of each run, scaled and clipped."""
    total = tl.zeros([BLOCK_RUNS, BLOCK_D], tl.float32)
    if chunk_sums_ptr is not None:
        num_chunks = length // CHUNK
        first_slot = start // CHUNK
        for first in range(0, tl.max(num_chunks, axis=0), UNROLL):
            for step in tl.static_range(UNROLL):
                inside = first + step < num_chunks
                slot = first_slot + first + step
                total += load_rows(chunk_sums_ptr, slot, inside, columns, DIM, INDEX)
        start += num_chunks * CHUNK
        length -= num_chunks * CHUNK
    total += _sum_occurrences(
        start,
        length,
        order_ptr,
        grad_ptr,
        gradient_rows_ptr,
        scales_ptr,
        columns,
        DIM,
        BLOCK_RUNS,
        BLOCK_D,
        UNROLL,
        INDEX,
    )
    if grad_multiplier_ptr is not None:
        total *= tl.load(grad_multiplier_ptr)
    if HAS_MAX:
        # By comparisons, so that NaN stays NaN.
        total = tl.where(total > max_gradient, max_gradient, total)
        total = tl.where(total < -max_gradient, -max_gradient, total)
    return total


@triton.jit
def _add_mean(state_ptr, row, inside, squares, DIM: tl.constexpr):
    """Add ``squares / DIM`` to the state of each row, and return it."""
    total = tl.load(state_ptr + row, mask=inside, other=0.0) + tl.div_rn(squares, DIM * 1.0)
    tl.store(state_ptr + row, total, mask=inside)
    return total


@triton.jit
def _rowwise_update_kernel(
    weight_ptr,
    state0_ptr,
    state1_ptr,
    unique_rows_ptr,
    starts_ptr,
    order_ptr,
    num_runs_ptr,
    chunk_sums_ptr,
    grad_ptr,
    gradient_rows_ptr,
    scales_ptr,
    lr_ptr,
    step_ptr,
    grad_multiplier_ptr,
    skip_ptr,
    row_offsets_ptr,
    row_keys_ptr,
    num_tables,
    eps,
    one_minus_beta1,
    one_minus_beta2,
    weight_decay,
    max_gradient,
    OPTIMIZER: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    HAS_MAX: tl.constexpr,
    CHUNK: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
    INDEX: tl.constexpr,
):
    """``g`` = sum of a run's gradients, then ``w = update(w, g)`` by the rules of
    :class:`torchembed.ops.rowwise_update.UpdateRule`. Under Adam, ``lr`` is the corrected step.

    Example: SGD, D = 1, ``weight = [[10], [20]]``, ``unique_rows = [1, -1]``,
    ``starts = [0, 2, 2]``, ``order = [0, 1]``, ``grad = [[3], [4]]``, lr 2:
    ``weight[1] = 20 - 2 * (3 + 4) = 6``.
    """
    first_run = tl.program_id(0).to(INDEX) * BLOCK_RUNS
    num_runs = tl.load(num_runs_ptr)
    if first_run >= num_runs:
        return
    if skip_ptr is not None:
        if tl.load(skip_ptr) != 0:
            return
    run = first_run + tl.arange(0, BLOCK_RUNS)
    inside = run < num_runs
    row = tl.load(unique_rows_ptr + run, mask=inside, other=0)
    start = tl.load(starts_ptr + run, mask=inside, other=0).to(INDEX)
    length = tl.load(starts_ptr + run + 1, mask=inside, other=0).to(INDEX) - start
    lr = tl.load(lr_ptr)

    if OPTIMIZER == _ROWWISE_ADAGRAD and DIM > BLOCK_D:
        # A row that takes several parts is summed twice: its step needs the mean over all of them.
        squares = tl.zeros([BLOCK_RUNS], tl.float32)
        for first_column in range(0, DIM, BLOCK_D):
            columns = first_column + tl.arange(0, BLOCK_D)
            gradient = _run_gradients(
                start,
                length,
                chunk_sums_ptr,
                order_ptr,
                grad_ptr,
                gradient_rows_ptr,
                scales_ptr,
                grad_multiplier_ptr,
                max_gradient,
                columns,
                HAS_MAX,
                CHUNK,
                DIM,
                BLOCK_RUNS,
                BLOCK_D,
                UNROLL,
                INDEX,
            )
            if HAS_DECAY:
                old = load_rows(weight_ptr, row, inside, columns, DIM, INDEX)
                gradient += weight_decay * old
            squares += tl.sum(gradient * gradient, axis=1)
        total = _add_mean(state0_ptr, row, inside, squares, DIM)[:, None]

    for first_column in range(0, DIM, BLOCK_D):
        columns = first_column + tl.arange(0, BLOCK_D)
        gradient = _run_gradients(
            start,
            length,
            chunk_sums_ptr,
            order_ptr,
            grad_ptr,
            gradient_rows_ptr,
            scales_ptr,
            grad_multiplier_ptr,
            max_gradient,
            columns,
            HAS_MAX,
            CHUNK,
            DIM,
            BLOCK_RUNS,
            BLOCK_D,
            UNROLL,
            INDEX,
        )
        old = load_rows(weight_ptr, row, inside, columns, DIM, INDEX)
        if HAS_DECAY:
            gradient += weight_decay * old

        if OPTIMIZER == _SGD:
            change = gradient
        elif OPTIMIZER == _ADAGRAD:
            total = load_rows(state0_ptr, row, inside, columns, DIM, INDEX) + gradient * gradient
            store_rows(state0_ptr, row, inside, columns, total, DIM, INDEX)
            change = tl.div_rn(gradient, tl.sqrt_rn(total) + eps)
        elif OPTIMIZER == _ROWWISE_ADAGRAD:
            if DIM <= BLOCK_D:
                squares = tl.sum(gradient * gradient, axis=1)
                total = _add_mean(state0_ptr, row, inside, squares, DIM)[:, None]
            change = tl.div_rn(gradient, tl.sqrt_rn(total) + eps)
        else:
            mean = load_rows(state0_ptr, row, inside, columns, DIM, INDEX)
            square = load_rows(state1_ptr, row, inside, columns, DIM, INDEX)
            mean += (gradient - mean) * one_minus_beta1
            square += (gradient * gradient - square) * one_minus_beta2
            store_rows(state0_ptr, row, inside, columns, mean, DIM, INDEX)
            store_rows(state1_ptr, row, inside, columns, square, DIM, INDEX)
            change = tl.div_rn(mean, tl.sqrt_rn(square) + eps)
        new = old - lr * change

        if row_keys_ptr is not None:
            step = tl.load(step_ptr)
            random = _rounding_bits(row, columns, row_offsets_ptr, row_keys_ptr, num_tables, step)
            rounded = stochastic_round(new, random, weight_ptr.dtype.element_ty)
        else:
            rounded = round_to_nearest(new, weight_ptr.dtype.element_ty)
        store_rows(weight_ptr, row, inside, columns, rounded, DIM, INDEX)


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def launch_rowwise_update(
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
    optimizer: int,
    eps: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    max_gradient: float,
) -> None:
    """``torchembed::rowwise_update``; see :func:`torchembed.ops.rowwise_update.rowwise_update`."""
    num_ids, dim = order.numel(), weight.shape[1]
    if num_ids == 0 or weight.numel() == 0:
        return
    num_slots = num_ids // CHUNK
    chunk_sums = None
    if num_slots:
        chunk_sums = torch.empty(num_slots, dim, dtype=torch.float32, device=weight.device)
    index = index_type(weight, grad, order, chunk_sums)
    with torch.cuda.device_of(weight):
        if chunk_sums is not None:
            chunk_starts = torch.empty(num_slots, dtype=torch.int32, device=weight.device)
            _rowwise_update_find_chunks_kernel[(triton.cdiv(num_slots, _BLOCK),)](
                chunk_starts, starts, num_runs, num_slots, CHUNK=CHUNK, BLOCK=_BLOCK, INDEX=index
            )
            block = row_block(dim, grad.dtype)
            grid = (triton.cdiv(num_slots, block.rows), triton.cdiv(dim, block.columns))
            _rowwise_update_chunks_kernel[grid](
                chunk_sums,
                chunk_starts,
                order,
                grad,
                gradient_rows,
                scales,
                num_slots,
                CHUNK=CHUNK,
                DIM=dim,
                BLOCK_SLOTS=block.rows,
                BLOCK_D=block.columns,
                UNROLL=_UNROLL,
                INDEX=index,
                num_warps=NUM_WARPS,
                enable_fp_fusion=False,
            )
        if optimizer == OptimizerKind.ADAM:
            step_size = torch.empty_like(lr)
            _rowwise_update_adam_step_kernel[(1,)](
                step_size, lr, step, LOG_BETA1=_log(beta1), LOG_BETA2=_log(beta2), num_warps=1
            )
            lr = step_size
        has_row_state = state0 is not None and state0.dim() == 2
        block = row_block(dim, weight.dtype, grad.dtype, *[torch.float32] * has_row_state)
        # Without fused multiply-adds the update has the bits of the reference for equal sums.
        _rowwise_update_kernel[(triton.cdiv(num_ids, block.rows),)](
            weight,
            state0,
            state1,
            unique_rows,
            starts,
            order,
            num_runs,
            chunk_sums,
            grad,
            gradient_rows,
            scales,
            lr,
            step,
            grad_multiplier,
            skip,
            None if row_offsets is None else row_offsets.contiguous(),
            None if row_keys is None else row_keys.contiguous(),
            0 if row_keys is None else row_keys.numel(),
            eps,
            1 - beta1,
            1 - beta2,
            weight_decay,
            max_gradient,
            OPTIMIZER=optimizer,
            HAS_DECAY=weight_decay != 0,
            HAS_MAX=max_gradient > 0,
            CHUNK=CHUNK,
            DIM=dim,
            BLOCK_RUNS=block.rows,
            BLOCK_D=block.columns,
            UNROLL=_UNROLL,
            INDEX=index,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
