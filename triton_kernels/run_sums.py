"""Sums of the gradients of runs, for ``rowwise_update``.

A run is divided into chunks of RUN_CHUNK occurrences and a rest, and its chunks into groups of
RUN_CHUNK chunks and a rest. Chunks are summed first, in parallel, into scratch memory of static
size, then groups of their sums. The update adds a run's groups, its remaining chunks and its
remaining occurrences. So a row that occurs 100,000 times is not one program's work, sums do not
depend on the rest of the batch, and the order of every sum is fixed.

Chunk k of a run that starts at sorted position s is stored at entry ``s // RUN_CHUNK + k``. No
other run's chunk has that entry, since at most one whole chunk starts in a window of RUN_CHUNK
positions, so no counter is needed to place them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.core.types import RUN_CHUNK
from torchembed.core.update_records import RowUpdate
from torchembed.triton_kernels.launch_sizes import cdiv
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
    on, added in their order; UNROLL rows of each are loaded at the same time.

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


@triton.jit(do_not_specialize=["num_windows"])
def _rowwise_update_chunks_kernel(
    sums_ptr,
    starts_ptr,
    order_ptr,
    chunk_runs_ptr,
    grad_ptr,
    gradient_rows_ptr,
    scales_ptr,
    num_windows,
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_WINDOWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
    INDEX: tl.constexpr,
):
    """``sums[j]`` = sum of the whole chunk that starts in window j, which is one of run
    ``chunk_runs[j]``; where there is none, the entry stays as it was. A chunk starts as far into
    its window as its run into the run's first window.

    With SPAN = CHUNK the same for groups: ``grad`` holds the sums of chunks, one for each window of
    SPAN positions. A whole group that starts among the windows ``[j * CHUNK, (j + 1) * CHUNK)``
    holds the last of them, whose run is then the group's.

    Example: CHUNK = 2, D = 1, ``starts = [1, 6, 7]``, ``chunk_runs = [0, 0, -1]``, gradients
    1 2 3 4 5 6 7 in sorted order: run 0 has the chunks [1, 3) and [3, 5) and a rest of one, run 1
    is a rest alone. With SPAN = 1 entry 0 becomes 2 + 3, entry 1 becomes 4 + 5, entry 2 stays.
    With SPAN = 2 and these sums entry 0 becomes 5 + 9.
    """
    # A window has one whole chunk at most, so each row of the block sums one chunk or none.
    window = tl.program_id(0).to(INDEX) * BLOCK_WINDOWS + tl.arange(0, BLOCK_WINDOWS)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    last = window * SPAN + (SPAN - 1)
    run = tl.load(chunk_runs_ptr + last, mask=window < num_windows, other=-1)
    has_chunk = run >= 0
    run_start = tl.load(starts_ptr + run, mask=has_chunk, other=0).to(INDEX)
    run_end = tl.load(starts_ptr + run + 1, mask=has_chunk, other=0).to(INDEX)
    first = run_start // SPAN
    start = window * CHUNK + first % CHUNK
    is_whole = has_chunk & (start + CHUNK <= first + (run_end - run_start) // SPAN)
    total = sum_occurrences(
        tl.zeros([BLOCK_WINDOWS, BLOCK_D], tl.float32),
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
    store_rows(sums_ptr, window, is_whole, columns, total, DIM, INDEX)


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
    # In the order that the specification of sums has: groups, then chunks that are in no group,
    # then the remaining occurrences.
    window, num_chunks = start // CHUNK, length // CHUNK
    if group_sums_ptr is not None:
        num_groups = num_chunks // CHUNK
        total = sum_occurrences(
            total,
            window // CHUNK,
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
        window += num_groups * CHUNK
        num_chunks -= num_groups * CHUNK
    if chunk_sums_ptr is not None:
        total = sum_occurrences(
            total, window, num_chunks, None, chunk_sums_ptr, None, None, columns, DIM, UNROLL, INDEX
        )
        start += length // CHUNK * CHUNK
        length %= CHUNK
    # Most runs have one occurrence. It is added by itself, so that a block of such runs does not go
    # through UNROLL masked loads.
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
        # By comparisons: tl.clamp may turn a NaN into a bound.
        total = tl.where(total > max_gradient, max_gradient, total)
        total = tl.where(total < -max_gradient, -max_gradient, total)
    return total


class ChunkSums(NamedTuple):
    """Scratch memory of :func:`sum_chunks`; None where a batch is too short for a chunk or a group.

    The k-th chunk of run u is at ``starts[u] // RUN_CHUNK + k``, the k-th group of chunks of which
    the first is at j is at ``j // RUN_CHUNK + k``.
    """

    chunks: Tensor | None
    """Float32 ``[L // RUN_CHUNK, D]``."""
    groups: Tensor | None
    """Float32 ``[L // RUN_CHUNK**2, D]``."""


def empty_chunk_sums(num_ids: int, dim: int, device: torch.device) -> ChunkSums:
    """Memory for the sums of a batch of ``num_ids``, whatever its runs are."""
    sizes = num_ids // RUN_CHUNK, num_ids // RUN_CHUNK**2
    return ChunkSums(
        *(
            torch.empty(size, dim, dtype=torch.float32, device=device) if size else None
            for size in sizes
        )
    )


def sum_chunks(sums: ChunkSums, update: RowUpdate, index: tl.dtype) -> None:
    """Write the sum of each whole chunk and group of a run to its entry; other entries stay."""
    chunks, groups = sums
    if chunks is None:
        return
    starts, chunk_runs = update.starts, update.chunk_runs
    gradients = update.grad, update.gradient_rows, update.scales
    _sum_windows(chunks, starts, update.order, chunk_runs, *gradients, 1, index)
    if groups is not None:
        # Sums of chunks lie in sorted order already, one gradient row for each, unscaled.
        _sum_windows(groups, starts, None, chunk_runs, chunks, None, None, RUN_CHUNK, index)


def _sum_windows(
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
    """Launch the kernel for chunks (``span`` 1) or for groups of them (``span`` RUN_CHUNK)."""
    num_windows, dim = sums.shape
    block = row_block(dim, torch.float32, num_warps=1)
    grid = (cdiv(num_windows, block.rows), cdiv(dim, block.columns))
    _rowwise_update_chunks_kernel[grid](
        sums,
        starts,
        order,
        chunk_runs,
        grad,
        gradient_rows,
        scales,
        num_windows,
        SPAN=span,
        CHUNK=RUN_CHUNK,
        DIM=dim,
        BLOCK_WINDOWS=block.rows,
        BLOCK_D=block.columns,
        UNROLL=_UNROLL,
        INDEX=index,
        num_warps=1,
        enable_fp_fusion=False,
    )
