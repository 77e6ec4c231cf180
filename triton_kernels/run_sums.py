"""Sums of the gradients of runs, on which ``rowwise_update`` builds.

A run is cut into chunks of RUN_CHUNK occurrences and a rest, and its chunks into groups of as many
chunks and a rest. Chunks are summed first, side by side, into a scratch of static size, then groups
of their sums; the update adds a run's groups, what chunks are left and what occurrences are left.
So a row that occurs 100,000 times is not one program's work, sums do not depend on the rest of the
batch, and the order of every sum is fixed. Finding the runs has found their chunks.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.core.types import RUN_CHUNK
from torchembed.core.update_records import RowUpdate
from torchembed.triton_kernels.row_blocks import load_rows, row_block, store_rows

_UNROLL = 16


@triton.jit
def sum_occurrences(
    total,
    start,
    length,
    order_ptr,
    grad_ptr,
    gradient_rows_ptr,
    scales_ptr,
    columns,
    DIM: tl.constexpr,
    UNROLL: tl.constexpr,
    INDEX: tl.constexpr,
):
    """``total [N, C]`` plus the gradients of the ``length [N]`` sorted positions from ``start [N]``
    on, added in their order; UNROLL rows of each are in flight together.

    Where ``order_ptr`` is None, position p has row p of ``grad``.
    """
    for first in range(0, tl.max(length, axis=0), UNROLL):
        for step in tl.static_range(UNROLL):
            inside = first + step < length
            position = start + first + step
            if order_ptr is not None:
                position = tl.load(order_ptr + position, mask=inside, other=0)
            gradient_row = position
            if gradient_rows_ptr is not None:
                gradient_row = tl.load(gradient_rows_ptr + position, mask=inside, other=0)
            gradients = load_rows(grad_ptr, gradient_row, inside, columns, DIM, INDEX)
            if scales_ptr is not None:
                gradients *= tl.load(scales_ptr + position, mask=inside, other=0.0)[:, None]
            total += gradients
    return total


@triton.jit(do_not_specialize=["num_slots"])
def _rowwise_update_chunks_kernel(
    sums_ptr,
    starts_ptr,
    order_ptr,
    chunk_runs_ptr,
    grad_ptr,
    gradient_rows_ptr,
    scales_ptr,
    num_slots,
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
    INDEX: tl.constexpr,
):
    """``sums[j]`` = sum of the whole chunk at slot j, which is one of run ``chunk_runs[j]``; where
    there is none it stays. A chunk starts as far into its slot as its run into the run's.

    With SPAN = CHUNK the same of groups: ``grad`` has the sums of chunks at slots of SPAN positions
    each, and a whole group at slots ``[j * CHUNK, (j + 1) * CHUNK)`` holds the last of these, which
    tells its run.

    Example: CHUNK = 2, D = 1, ``starts = [1, 6, 7]``, ``chunk_runs = [0, 0, -1]``, gradients
    1 2 3 4 5 6 7 in sorted order: run 0 has the chunks [1, 3) and [3, 5) and a rest of one, run 1
    is a rest alone. With SPAN = 1 slot 0 holds 2 + 3, slot 1 holds 4 + 5, slot 2 stays as it was.
    With SPAN = 2 and these sums slot 0 holds 5 + 9.
    """
    slot = tl.program_id(0).to(INDEX) * BLOCK_SLOTS + tl.arange(0, BLOCK_SLOTS)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    last = slot * SPAN + (SPAN - 1)
    run = tl.load(chunk_runs_ptr + last, mask=slot < num_slots, other=-1)
    has_chunk = run >= 0
    run_start = tl.load(starts_ptr + run, mask=has_chunk, other=0).to(INDEX)
    run_end = tl.load(starts_ptr + run + 1, mask=has_chunk, other=0).to(INDEX)
    first = run_start // SPAN
    start = slot * CHUNK + first % CHUNK
    is_whole = has_chunk & (start + CHUNK <= first + (run_end - run_start) // SPAN)
    total = sum_occurrences(
        tl.zeros([BLOCK_SLOTS, BLOCK_D], tl.float32),
        start,
        tl.where(is_whole, CHUNK, 0),
        order_ptr,
        grad_ptr,
        gradient_rows_ptr,
        scales_ptr,
        columns,
        DIM,
        UNROLL,
        INDEX,
    )
    store_rows(sums_ptr, slot, is_whole, columns, total, DIM, INDEX)


@triton.jit
def run_gradients(
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
    slot, num_chunks = start // CHUNK, length // CHUNK
    if group_sums_ptr is not None:
        num_groups = num_chunks // CHUNK
        total = sum_occurrences(
            total,
            slot // CHUNK,
            num_groups,
            None,
            group_sums_ptr,
            None,
            None,
            columns,
            DIM,
            UNROLL,
            INDEX,
        )
        slot += num_groups * CHUNK
        num_chunks -= num_groups * CHUNK
    if chunk_sums_ptr is not None:
        total = sum_occurrences(
            total, slot, num_chunks, None, chunk_sums_ptr, None, None, columns, DIM, UNROLL, INDEX
        )
        start += length // CHUNK * CHUNK
        length %= CHUNK
    # Most runs are one occurrence long: the first of each is taken by itself.
    total = sum_occurrences(
        total,
        start,
        tl.minimum(length, 1),
        order_ptr,
        grad_ptr,
        gradient_rows_ptr,
        scales_ptr,
        columns,
        DIM,
        1,
        INDEX,
    )
    total = sum_occurrences(
        total,
        start + 1,
        length - 1,
        order_ptr,
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


class ChunkSums(NamedTuple):
    """Scratch for :func:`sum_chunks`; None where the batch has no room for a chunk or a group.

    The k-th chunk of run u is at ``starts[u] // RUN_CHUNK + k``, the k-th group of chunks that
    start at slot j is at ``j // RUN_CHUNK + k``.
    """

    chunks: Tensor | None
    """Float32 ``[L // RUN_CHUNK, D]``."""
    groups: Tensor | None
    """Float32 ``[L // RUN_CHUNK**2, D]``."""


def empty_chunk_sums(num_ids: int, dim: int, device: torch.device) -> ChunkSums:
    sizes = num_ids // RUN_CHUNK, num_ids // RUN_CHUNK**2
    return ChunkSums(
        *(
            torch.empty(size, dim, dtype=torch.float32, device=device) if size else None
            for size in sizes
        )
    )


def sum_chunks(sums: ChunkSums, update: RowUpdate, index: tl.dtype) -> None:
    """Write the sum of each whole chunk and group of a run to its place; other places stay."""
    chunks, groups = sums
    if chunks is None:
        return
    starts, chunk_runs = update.starts, update.chunk_runs
    gradients = update.grad, update.gradient_rows, update.scales
    _sum_slots(chunks, starts, update.order, chunk_runs, *gradients, 1, index)
    if groups is not None:
        # Sums of chunks lie in sorted order already, one gradient row for each, unscaled.
        _sum_slots(groups, starts, None, chunk_runs, chunks, None, None, RUN_CHUNK, index)


def _sum_slots(
    sums: Tensor,
    starts: Tensor,
    order: Tensor | None,
    chunk_runs: Tensor,
    grad: Tensor,
    gradient_rows: Tensor | None,
    scales: Tensor | None,
    span: int,
    index: tl.dtype,
) -> None:
    num_slots, dim = sums.shape
    block = row_block(dim, torch.float32, num_warps=1)
    grid = (triton.cdiv(num_slots, block.rows), triton.cdiv(dim, block.columns))
    _rowwise_update_chunks_kernel[grid](
        sums,
        starts,
        order,
        chunk_runs,
        grad,
        gradient_rows,
        scales,
        num_slots,
        SPAN=span,
        CHUNK=RUN_CHUNK,
        DIM=dim,
        BLOCK_SLOTS=block.rows,
        BLOCK_D=block.columns,
        UNROLL=_UNROLL,
        INDEX=index,
        num_warps=1,
        enable_fp_fusion=False,
    )
