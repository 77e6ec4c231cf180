"""The Triton kernels of ``rowwise_update``, over the sums of ``run_sums.py``.

Byte floor, for L occurrences of U rows: ``L * (4 + gradient row index + scale)``, the gradient rows
that the batch has (each read once, as far as the cache reaches), and ``2 * U * D * (weight bytes +
4 * states)`` for rows and their state, read and written.
"""

import math

import torch
import triton
import triton.language as tl

from torchembed.core.types import RUN_CHUNK, OptimizerKind
from torchembed.core.update_records import RowUpdate
from torchembed.triton_kernels.launch_sizes import cdiv, next_power_of_2
from torchembed.triton_kernels.random_bits import random_bits
from torchembed.triton_kernels.rounding import round_to_nearest, stochastic_round
from torchembed.triton_kernels.row_blocks import (
    column_block,
    index_type,
    load_rows,
    store_rows,
)
from torchembed.triton_kernels.run_sums import (
    empty_chunk_sums,
    run_gradients,
    sum_chunks,
)
from torchembed.triton_kernels.searching import count_not_above

# A warp takes two rows of 128 columns. With more, its registers leave no space for other warps on
# the multiprocessor; with one, too few loads are in flight.
_NUM_WARPS = 4
_BLOCK_ELEMENTS = 1024
_UNROLL = 4
# A row is read and written once in a step, so it makes room in the cache for gradients, which
# several runs may read.
_EVICT = tl.constexpr("evict_first")

_SGD = tl.constexpr(int(OptimizerKind.SGD))
_ADAGRAD = tl.constexpr(int(OptimizerKind.ADAGRAD))
_ROWWISE_ADAGRAD = tl.constexpr(int(OptimizerKind.ROWWISE_ADAGRAD))


@triton.jit
def _rowwise_update_adam_step_kernel(
    step_size_ptr, lr_ptr, step_ptr, LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr
):
    """``lr * sqrt(1 - beta2**step) / (1 - beta1**step)``, computed in float64.

    Example: lr 1, step 1, beta1 0 and beta2 3/4 give ``sqrt(1/4) / 1 = 1/2``.
    """
    # In float64, since powers of a beta near 1 lose their digits in float32.
    count = tl.load(step_ptr).to(tl.float64)
    correction1 = 1.0 - tl.exp(count * LOG_BETA1)
    correction2 = 1.0 - tl.exp(count * LOG_BETA2)
    step_size = tl.load(lr_ptr).to(tl.float64) * tl.sqrt(correction2) / correction1
    tl.store(step_size_ptr, step_size.to(tl.float32))


@triton.jit
def _rounding_bits(
    row, columns, row_offsets_ptr, row_keys_ptr, first_columns_ptr, num_tables, step
):
    """Random bits for each element, uint64, a function of table, row, step and column alone, of
    which the upper 16 count: the element's own of the 64 that four columns share."""
    # The last table that begins at or before the row, so never one without rows.
    table = count_not_above(row_offsets_ptr, num_tables, row, 1, 1) - 1
    row_key = random_bits(tl.load(row_keys_ptr + table), row)
    step_key = random_bits(row_key, step.to(tl.int64))
    column = columns[None, :]
    if first_columns_ptr is not None:
        column += tl.load(first_columns_ptr + table)[:, None]
    return random_bits(step_key[:, None], column >> 2) << ((column & 3) * 16).to(tl.uint64)


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
    group_sums_ptr,
    grad_ptr,
    gradient_rows_ptr,
    scales_ptr,
    lr_ptr,
    step_ptr,
    grad_multiplier_ptr,
    skip_ptr,
    row_offsets_ptr,
    row_keys_ptr,
    first_columns_ptr,
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
    VECTOR: tl.constexpr,
    INDEX: tl.constexpr,
):
    """``g`` = sum of a run's gradients, then ``w = update(w, g)`` by the rules of
    :class:`torchembed.ops.rowwise_update.UpdateRule`. Under Adam, ``lr`` is the corrected step.

    A program takes BLOCK_RUNS runs at a time. Their rows and state do not wait for the gradients,
    so they are read first.

    Example: SGD, D = 1, ``weight = [[10], [20]]``, ``unique_rows = [1, -1]``,
    ``starts = [0, 2, 2]``, ``order = [0, 1]``, ``grad = [[3], [4]]``, lr 2:
    ``weight[1] = 20 - 2 * (3 + 4) = 6``.
    """
    # The grid is for as many runs as there could be; most programs may have none.
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
    if OPTIMIZER == _ROWWISE_ADAGRAD:
        row_total = tl.load(state0_ptr + row, mask=inside, other=0.0)

    if OPTIMIZER == _ROWWISE_ADAGRAD and DIM > BLOCK_D:
        # A row longer than a block is gone through twice, since the step of each element needs the
        # mean of squares of all of them.
        squares = tl.zeros([BLOCK_RUNS], tl.float32)
        for first_column in range(0, DIM, BLOCK_D):
            columns = first_column + column_block(BLOCK_D, VECTOR)
            gradient = run_gradients(
                start,
                length,
                chunk_sums_ptr,
                group_sums_ptr,
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
        row_total += tl.div_rn(squares, DIM * 1.0)

    for first_column in range(0, DIM, BLOCK_D):
        columns = first_column + column_block(BLOCK_D, VECTOR)
        # Loaded before the gradients are summed, so that both are under way at once.
        old = load_rows(weight_ptr, row, inside, columns, DIM, INDEX, _EVICT)
        if OPTIMIZER != _SGD and OPTIMIZER != _ROWWISE_ADAGRAD:
            state0 = load_rows(state0_ptr, row, inside, columns, DIM, INDEX, _EVICT)
            if OPTIMIZER != _ADAGRAD:
                state1 = load_rows(state1_ptr, row, inside, columns, DIM, INDEX, _EVICT)
        gradient = run_gradients(
            start,
            length,
            chunk_sums_ptr,
            group_sums_ptr,
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
            gradient += weight_decay * old

        if OPTIMIZER == _SGD:
            change = gradient
        elif OPTIMIZER == _ADAGRAD:
            state0 += gradient * gradient
            store_rows(state0_ptr, row, inside, columns, state0, DIM, INDEX, _EVICT)
            change = tl.div_rn(gradient, tl.sqrt_rn(state0) + eps)
        elif OPTIMIZER == _ROWWISE_ADAGRAD:
            if DIM <= BLOCK_D:
                squares = tl.sum(gradient * gradient, axis=1)
                row_total += tl.div_rn(squares, DIM * 1.0)
            change = tl.div_rn(gradient, (tl.sqrt_rn(row_total) + eps)[:, None])
        else:
            state0 += (gradient - state0) * one_minus_beta1
            state1 += (gradient * gradient - state1) * one_minus_beta2
            store_rows(state0_ptr, row, inside, columns, state0, DIM, INDEX, _EVICT)
            store_rows(state1_ptr, row, inside, columns, state1, DIM, INDEX, _EVICT)
            change = tl.div_rn(state0, tl.sqrt_rn(state1) + eps)
        new = old - lr * change

        if row_keys_ptr is not None:
            step = tl.load(step_ptr)
            random = _rounding_bits(
                row, columns, row_offsets_ptr, row_keys_ptr, first_columns_ptr, num_tables, step
            )
            rounded = stochastic_round(new, random, weight_ptr.dtype.element_ty)
        else:
            rounded = round_to_nearest(new, weight_ptr.dtype.element_ty)
        store_rows(weight_ptr, row, inside, columns, rounded, DIM, INDEX, _EVICT)

    if OPTIMIZER == _ROWWISE_ADAGRAD:
        # One thread writes the row's state: only after every thread that reads it has done so.
        tl.debug_barrier()
        tl.store(state0_ptr + row, row_total, mask=inside)


def _log(beta: float) -> float:
    """The logarithm of ``beta``, by which a kernel takes its powers; -inf for 0."""
    return math.log(beta) if beta > 0 else -math.inf


def step_size(update: RowUpdate) -> torch.Tensor:
    """The factor of a row's change, float32 ``[1]``: ``lr``, and for Adam its
    corrected step size."""
    if update.optimizer != OptimizerKind.ADAM:
        return update.lr
    # One launch more, so that every program reads the corrected step in place of taking powers of
    # the betas in float64.
    corrected = torch.empty_like(update.lr)
    with torch.cuda.device_of(update.lr):
        _rowwise_update_adam_step_kernel[(1,)](
            corrected,
            update.lr,
            update.step,
            LOG_BETA1=_log(update.beta1),
            LOG_BETA2=_log(update.beta2),
            num_warps=1,
        )
    return corrected


def launch_rowwise_update(update: RowUpdate) -> None:
    """``torchembed::rowwise_update``; see :func:`torchembed.ops.rowwise_update.rowwise_update`."""
    weight, state0, row_keys = update.weight, update.state0, update.row_keys
    num_ids, dim = update.order.numel(), weight.shape[1]
    if num_ids == 0 or weight.numel() == 0:
        return
    sums = empty_chunk_sums(num_ids, dim, weight.device)
    index = index_type(weight, update.grad, update.order, sums.chunks)
    with torch.cuda.device_of(weight):
        sum_chunks(sums, update, index)
        has_row_state = state0 is not None and state0.dim() == 2
        block_columns = min(next_power_of_2(dim), _BLOCK_ELEMENTS)
        block_runs = _BLOCK_ELEMENTS // block_columns
        # The number of runs is on the device, so programs are as many as there could be runs; those
        # past the last one end at once. Without fused multiply-adds the update has the bits of the
        # reference for equal sums.
        _rowwise_update_kernel[(cdiv(num_ids, block_runs),)](
            weight,
            state0,
            update.state1,
            update.unique_rows,
            update.starts,
            update.order,
            update.num_runs,
            *sums,
            update.grad,
            update.gradient_rows,
            update.scales,
            step_size(update),
            update.step,
            update.grad_multiplier,
            update.skip,
            update.row_offsets,
            row_keys,
            update.first_columns,
            0 if row_keys is None else row_keys.numel(),
            update.eps,
            1 - update.beta1,
            1 - update.beta2,
            update.weight_decay,
            update.max_gradient,
            OPTIMIZER=update.optimizer,
            HAS_DECAY=update.weight_decay != 0,
            HAS_MAX=update.max_gradient > 0,
            CHUNK=RUN_CHUNK,
            DIM=dim,
            BLOCK_RUNS=block_runs,
            BLOCK_D=block_columns,
            UNROLL=_UNROLL,
            VECTOR=16 // max(weight.itemsize, 4 * has_row_state),
            INDEX=index,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )
