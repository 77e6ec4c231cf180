"""The Triton kernels of ``rowwise_update``, over the sums of ``run_sums.py``.

Byte floor, for L occurrences of U rows: ``L * (4 + gradient row index + scale)``, the gradient rows
that the batch has (each read once, as far as the cache reaches), and ``2 * U * D * (weight bytes +
4 * states)`` for rows and their state, read and written.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.core.types import OptimizerKind
from torchembed.triton_kernels.random_bits import random_bits
from torchembed.triton_kernels.rounding import round_to_nearest, stochastic_round
from torchembed.triton_kernels.row_blocks import (
    RowBlock,
    column_block,
    index_type,
    load_rows,
    store_rows,
)
from torchembed.triton_kernels.run_sums import CHUNK, add_chunks, sort_gradients, sum_occurrences
from torchembed.triton_kernels.searching import count_not_above

_NUM_WARPS = 1
_BLOCK_ELEMENTS = 256
_PROGRAMS_PER_SM = 32
_MAX_COPY_DIM = 256
_UNROLL = 2
_EVICT = "evict_first"

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
    count = tl.load(step_ptr).to(tl.float64)
    correction1 = 1.0 - tl.exp(count * LOG_BETA1)
    correction2 = 1.0 - tl.exp(count * LOG_BETA2)
    step_size = tl.load(lr_ptr).to(tl.float64) * tl.sqrt(correction2) / correction1
    tl.store(step_size_ptr, step_size.to(tl.float32))


@triton.jit
def _rounding_bits(
    row, columns, row_offsets_ptr, row_keys_ptr, first_columns_ptr, num_tables, step
):
    """64 random bits for each element, a function of table, row, step and column alone."""
    table = count_not_above(row_offsets_ptr, num_tables, row, 1, 1) - 1
    row_key = random_bits(tl.load(row_keys_ptr + table), row)
    step_key = random_bits(row_key, step.to(tl.int64))
    column = columns[None, :]
    if first_columns_ptr is not None:
        column += tl.load(first_columns_ptr + table)[:, None]
    return random_bits(step_key[:, None], column)


@triton.jit
def _next_runs(
    unique_rows_ptr, starts_ptr, num_runs, block, BLOCK_RUNS: tl.constexpr, INDEX: tl.constexpr
):
    """Row, start and length of each run of a ``block``; zeros past the last run."""
    run = block * BLOCK_RUNS + tl.arange(0, BLOCK_RUNS)
    inside = run < num_runs
    row = tl.load(unique_rows_ptr + run, mask=inside, other=0)
    start = tl.load(starts_ptr + run, mask=inside, other=0)
    length = tl.load(starts_ptr + run + 1, mask=inside, other=0) - start
    return row, start.to(INDEX), length.to(INDEX)


@triton.jit
def _rest_of_run(start, length, HAS_CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """Start and length of what is left of runs after their whole chunks."""
    if HAS_CHUNKS:
        rest = length % CHUNK
        start += length - rest
        length = rest
    return start, length


@triton.jit
def _run_gradients(
    start,
    length,
    gradient_row,
    scale,
    chunk_sums_ptr,
    group_sums_ptr,
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
    """Float32 ``[BLOCK_RUNS, BLOCK_D]``: the gradient of each run, scaled and clipped.

    ``gradient_row`` and ``scale`` are those of the first occurrence after the chunks.
    """
    rest_start, rest = _rest_of_run(start, length, chunk_sums_ptr is not None, CHUNK)
    first = load_rows(grad_ptr, gradient_row, rest > 0, columns, DIM, INDEX)
    if scales_ptr is not None:
        first *= scale[:, None]
    total = tl.zeros([BLOCK_RUNS, BLOCK_D], tl.float32)
    if chunk_sums_ptr is not None:
        total = add_chunks(
            total,
            start,
            length,
            chunk_sums_ptr,
            group_sums_ptr,
            columns,
            CHUNK,
            DIM,
            UNROLL,
            INDEX,
        )
    total += first
    total = sum_occurrences(
        total,
        rest_start + 1,
        rest - 1,
        grad_ptr,
        gradient_rows_ptr,
        scales_ptr,
        columns,
        DIM,
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


@triton.jit(do_not_specialize=["num_tables"])
def _rowwise_update_kernel(
    weight_ptr,
    state0_ptr,
    state1_ptr,
    unique_rows_ptr,
    starts_ptr,
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
    EVICT: tl.constexpr,
):
    """``g`` = sum of a run's gradients, then ``w = update(w, g)`` by the rules of
    :class:`torchembed.ops.rowwise_update.UpdateRule`. Under Adam, ``lr`` is the corrected step.

    A program takes BLOCK_RUNS runs at a time, and knows ahead where they are: while it waits for
    rows and gradients, it reads which gradients the next runs have, and where the runs after those
    start. So nothing but rows and gradients is waited for.

    Example: SGD, D = 1, ``weight = [[10], [20]]``, ``unique_rows = [1, -1]``,
    ``starts = [0, 2, 2]``, ``gradient_rows = [0, 1]``, ``grad = [[3], [4]]``, lr 2:
    ``weight[1] = 20 - 2 * (3 + 4) = 6``.
    """
    num_runs = tl.load(num_runs_ptr)
    if skip_ptr is not None:
        if tl.load(skip_ptr) != 0:
            num_runs = 0
    lr = tl.load(lr_ptr)
    stride = tl.num_programs(0)
    first_block = tl.program_id(0)
    HAS_CHUNKS: tl.constexpr = chunk_sums_ptr is not None
    row, start, length = _next_runs(
        unique_rows_ptr, starts_ptr, num_runs, first_block, BLOCK_RUNS, INDEX
    )
    next_row, next_start, next_length = _next_runs(
        unique_rows_ptr, starts_ptr, num_runs, first_block + stride, BLOCK_RUNS, INDEX
    )
    rest_start, rest = _rest_of_run(start, length, HAS_CHUNKS, CHUNK)
    gradient_row = tl.load(gradient_rows_ptr + rest_start, mask=rest > 0, other=0)
    scale = tl.zeros([BLOCK_RUNS], tl.float32)
    if scales_ptr is not None:
        scale = tl.load(scales_ptr + rest_start, mask=rest > 0, other=0.0)

    for block in range(first_block, tl.cdiv(num_runs, BLOCK_RUNS), stride):
        inside = length > 0
        rest_start, rest = _rest_of_run(next_start, next_length, HAS_CHUNKS, CHUNK)
        next_gradient_row = tl.load(gradient_rows_ptr + rest_start, mask=rest > 0, other=0)
        next_scale = scale
        if scales_ptr is not None:
            next_scale = tl.load(scales_ptr + rest_start, mask=rest > 0, other=0.0)
        later_row, later_start, later_length = _next_runs(
            unique_rows_ptr, starts_ptr, num_runs, block + 2 * stride, BLOCK_RUNS, INDEX
        )

        if OPTIMIZER == _ROWWISE_ADAGRAD:
            row_total = tl.load(state0_ptr + row, mask=inside, other=0.0)
        if OPTIMIZER == _ROWWISE_ADAGRAD and DIM > BLOCK_D:
            # A row that takes several parts is summed twice: its step needs the mean of all.
            squares = tl.zeros([BLOCK_RUNS], tl.float32)
            for first_column in range(0, DIM, BLOCK_D):
                columns = first_column + column_block(BLOCK_D, VECTOR)
                gradient = _run_gradients(
                    start,
                    length,
                    gradient_row,
                    scale,
                    chunk_sums_ptr,
                    group_sums_ptr,
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
            old = load_rows(weight_ptr, row, inside, columns, DIM, INDEX, EVICT)
            if OPTIMIZER != _SGD and OPTIMIZER != _ROWWISE_ADAGRAD:
                state0 = load_rows(state0_ptr, row, inside, columns, DIM, INDEX, EVICT)
                if OPTIMIZER != _ADAGRAD:
                    state1 = load_rows(state1_ptr, row, inside, columns, DIM, INDEX, EVICT)
            gradient = _run_gradients(
                start,
                length,
                gradient_row,
                scale,
                chunk_sums_ptr,
                group_sums_ptr,
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
                store_rows(state0_ptr, row, inside, columns, state0, DIM, INDEX, EVICT)
                change = tl.div_rn(gradient, tl.sqrt_rn(state0) + eps)
            elif OPTIMIZER == _ROWWISE_ADAGRAD:
                if DIM <= BLOCK_D:
                    squares = tl.sum(gradient * gradient, axis=1)
                    row_total += tl.div_rn(squares, DIM * 1.0)
                change = tl.div_rn(gradient, (tl.sqrt_rn(row_total) + eps)[:, None])
            else:
                state0 += (gradient - state0) * one_minus_beta1
                state1 += (gradient * gradient - state1) * one_minus_beta2
                store_rows(state0_ptr, row, inside, columns, state0, DIM, INDEX, EVICT)
                store_rows(state1_ptr, row, inside, columns, state1, DIM, INDEX, EVICT)
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
            store_rows(weight_ptr, row, inside, columns, rounded, DIM, INDEX, EVICT)

        if OPTIMIZER == _ROWWISE_ADAGRAD:
            # Every thread that holds a part of the row has read its state, and one writes it: the
            # thread of the first column, so that totals need not change hands.
            if BLOCK_D > 32 * VECTOR:
                tl.debug_barrier()
            columns = column_block(BLOCK_D, VECTOR)
            state_at = row[:, None] + columns[None, :]
            is_first = inside[:, None] & (columns == 0)[None, :]
            totals = tl.broadcast_to(row_total[:, None], [BLOCK_RUNS, BLOCK_D])
            tl.store(state0_ptr + state_at, totals, mask=is_first)

        row, start, length = next_row, next_start, next_length
        gradient_row, scale = next_gradient_row, next_scale
        next_row, next_start, next_length = later_row, later_start, later_length


def _run_block(dim: int) -> RowBlock:
    """What one program of one warp takes at a time."""
    columns = min(triton.next_power_of_2(dim), _BLOCK_ELEMENTS)
    return RowBlock(_BLOCK_ELEMENTS // columns, columns)


def _max_programs(device: torch.device) -> int:
    """As many programs as a GPU runs side by side."""
    if device.type != "cuda":
        return 4
    return _PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _copy_engine_update() -> Callable[..., Any] | None:
    """The library's update; None where it was built without CUDA or is not loaded."""
    return getattr(torch.ops.torchembed_native, "update_rows", None)


def _suits_copy_engine(weight: Tensor, state: Tensor | None, grad: Tensor, optimizer: int) -> bool:
    """Whether the library's update takes these rows: on an H100 or later, in float32, of a middling
    length that 16 bytes divide."""
    dim = weight.shape[1]
    rows = [weight, grad, *([state] if state is not None and state.dim() == 2 else [])]
    return (
        weight.is_cuda
        and _copy_engine_update() is not None
        and torch.cuda.get_device_capability(weight.device) >= (9, 0)
        and optimizer != OptimizerKind.ADAM
        and weight.dtype == torch.float32
        and 32 <= dim <= _MAX_COPY_DIM
        and all(dim * t.itemsize % 16 == 0 and t.data_ptr() % 16 == 0 for t in rows)
    )


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
    first_columns: Tensor | None,
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
    with torch.cuda.device_of(weight):
        gradients = sort_gradients(starts, order, num_runs, grad, gradient_rows, scales)
        if _suits_copy_engine(weight, state0, grad, optimizer):
            update = _copy_engine_update()
            assert update is not None
            update(
                weight,
                state0,
                unique_rows,
                starts,
                num_runs,
                *gradients,
                lr,
                grad_multiplier,
                skip,
                optimizer,
                eps,
                weight_decay,
                max_gradient,
                torch.cuda.current_stream(weight.device).cuda_stream,
            )
            return
        if optimizer == OptimizerKind.ADAM:
            step_size = torch.empty_like(lr)
            _rowwise_update_adam_step_kernel[(1,)](
                step_size, lr, step, LOG_BETA1=_log(beta1), LOG_BETA2=_log(beta2), num_warps=1
            )
            lr = step_size
        has_row_state = state0 is not None and state0.dim() == 2
        block = _run_block(dim)
        num_programs = min(triton.cdiv(num_ids, block.rows), _max_programs(weight.device))
        # Without fused multiply-adds the update has the bits of the reference for equal sums.
        _rowwise_update_kernel[(num_programs,)](
            weight,
            state0,
            state1,
            unique_rows,
            starts,
            num_runs,
            *gradients,
            lr,
            step,
            grad_multiplier,
            skip,
            None if row_offsets is None else row_offsets.contiguous(),
            None if row_keys is None else row_keys.contiguous(),
            None if first_columns is None else first_columns.contiguous(),
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
            VECTOR=16 // max(weight.itemsize, 4 * has_row_state),
            INDEX=index_type(weight, grad, order, gradients.chunk_sums),
            EVICT=_EVICT,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )
