"""Sums of the gradients of runs, on which ``rowwise_update`` builds.

A run is cut into chunks of CHUNK occurrences and a rest. The chunks are summed first, side by
side, into a scratch of static size; the update then adds a run's few chunks and its rest. So a row
that occurs 100,000 times is not one program's work, sums do not depend on the rest of the batch,
and the order of every sum is fixed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.triton_kernels.row_blocks import NUM_WARPS, load_rows, row_block, store_rows
from torchembed.triton_kernels.searching import count_not_above

CHUNK = 128
UNROLL = 4
_BLOCK = 128


@triton.jit
def sum_occurrences(
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
    total = sum_occurrences(
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
def run_gradients(
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
    total += sum_occurrences(
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


def empty_chunk_sums(num_ids: int, dim: int, device: torch.device) -> Tensor | None:
    """Scratch for :func:`sum_chunks`, float32 ``[L // CHUNK, D]``; None where no chunk fits.

    The k-th chunk of run u is at ``starts[u] // CHUNK + k``.
    """
    if num_ids < CHUNK:
        return None
    return torch.empty(num_ids // CHUNK, dim, dtype=torch.float32, device=device)


def sum_chunks(
    chunk_sums: Tensor,
    starts: Tensor,
    order: Tensor,
    num_runs: Tensor,
    grad: Tensor,
    gradient_rows: Tensor | None,
    scales: Tensor | None,
    index: tl.dtype,
) -> None:
    """Write the sum of each whole chunk of a run to its slot; other slots stay as they are."""
    num_slots, dim = chunk_sums.shape
    chunk_starts = torch.empty(num_slots, dtype=torch.int32, device=grad.device)
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
        UNROLL=UNROLL,
        INDEX=index,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
