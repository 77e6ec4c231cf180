"""Sums of the gradients of runs, on which ``rowwise_update`` builds.

A run is cut into chunks of CHUNK occurrences and a rest, and its chunks into groups of CHUNK chunks
and a rest. Chunks are summed first, side by side, into a scratch of static size, then groups of
their sums; the update adds a run's groups, what chunks are left and what occurrences are left. So a
row that occurs 100,000 times is not one program's work, sums do not depend on the rest of the
batch, and the order of every sum is fixed.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.triton_kernels.row_blocks import (
    index_type,
    load_rows,
    row_block,
    store_rows,
)
from torchembed.triton_kernels.searching import count_not_above

CHUNK = 32
_UNROLL = 16
_CHUNK_WARPS = 4
_BLOCK = 128
_BLOCK_POSITIONS = 1024


@triton.jit
def sum_occurrences(
    total,
    start,
    length,
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

    Sorted position p has the gradient ``scales[p] * grad[gradient_rows[p]]``; where these are None,
    ``grad[p]``.
    """
    for first in range(0, tl.max(length, axis=0), UNROLL):
        for step in tl.static_range(UNROLL):
            inside = first + step < length
            position = start + first + step
            gradient_row = position
            if gradient_rows_ptr is not None:
                gradient_row = tl.load(gradient_rows_ptr + position, mask=inside, other=0)
            gradients = load_rows(grad_ptr, gradient_row, inside, columns, DIM, INDEX)
            if scales_ptr is not None:
                gradients *= tl.load(scales_ptr + position, mask=inside, other=0.0)[:, None]
            total += gradients
    return total


@triton.jit
def _find_chunks(
    program,
    chunk_starts_ptr,
    group_starts_ptr,
    starts_ptr,
    num_runs_ptr,
    num_chunks,
    num_groups,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    INDEX: tl.constexpr,
):
    """``chunk_starts[j]`` = start of the whole chunk that starts in sorted positions
    ``[j * CHUNK, (j + 1) * CHUNK)``, -1 where none does; ``group_starts[j]`` likewise = slot of the
    first chunk of the whole group that starts in slots ``[j * CHUNK, (j + 1) * CHUNK)``.

    The chunks of run u start at ``starts[u] + k * CHUNK``, so no two of them share a slot j; and a
    chunk of slot j holds the slot's last position, which tells its run. The same goes for groups.
    """
    slot = program.to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    last = slot * CHUNK + (CHUNK - 1)
    run = count_not_above(starts_ptr, tl.load(num_runs_ptr), last, 1, 1) - 1
    in_run = (slot < num_chunks) & (run >= 0)
    run_start = tl.load(starts_ptr + run, mask=in_run, other=0).to(INDEX)
    run_end = tl.load(starts_ptr + run + 1, mask=in_run, other=0).to(INDEX)
    start = run_start + (last - run_start) // CHUNK * CHUNK
    is_whole = in_run & (start + CHUNK <= run_end)
    found = tl.where(is_whole, start, -1).to(tl.int32)
    tl.store(chunk_starts_ptr + slot, found, mask=slot < num_chunks)

    group = slot // CHUNK
    is_last = (slot % CHUNK == CHUNK - 1) & (group < num_groups)
    run_slot = run_start // CHUNK
    run_slot_end = run_slot + (run_end - run_start) // CHUNK
    group_start = run_slot + (slot - run_slot) // CHUNK * CHUNK
    is_whole = in_run & (group_start + CHUNK <= run_slot_end)
    found = tl.where(is_whole, group_start, -1).to(tl.int32)
    tl.store(group_starts_ptr + group, found, mask=is_last)


@triton.jit(do_not_specialize=["num_ids", "num_chunks", "num_groups", "num_chunk_programs"])
def _rowwise_update_prepare_kernel(
    chunk_starts_ptr,
    group_starts_ptr,
    sorted_gradient_rows_ptr,
    sorted_scales_ptr,
    starts_ptr,
    order_ptr,
    num_runs_ptr,
    gradient_rows_ptr,
    scales_ptr,
    num_ids,
    num_chunks,
    num_groups,
    num_chunk_programs,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_POSITIONS: tl.constexpr,
    INDEX: tl.constexpr,
):
    """The first programs find chunks and groups. The others put what belongs to positions into
    sorted order: ``sorted_gradient_rows[p] = gradient_rows[order[p]]``, and scales likewise.

    Example: CHUNK = 2, ``starts = [1, 6, 7]``: run 0 has the chunks [1, 3) and [3, 5) and a rest of
    one, run 1 is a rest alone. ``chunk_starts = [1, 3, -1]``, ``group_starts = [0]``. With
    ``order = [2, 0, 1]`` the gradient rows 5 6 7 become 7 5 6.
    """
    program = tl.program_id(0)
    if program < num_chunk_programs:
        _find_chunks(
            program,
            chunk_starts_ptr,
            group_starts_ptr,
            starts_ptr,
            num_runs_ptr,
            num_chunks,
            num_groups,
            CHUNK,
            BLOCK,
            INDEX,
        )
    else:
        block = (program - num_chunk_programs).to(INDEX)
        place = block * BLOCK_POSITIONS + tl.arange(0, BLOCK_POSITIONS)
        inside = place < num_ids
        position = tl.load(order_ptr + place, mask=inside, other=0)
        if gradient_rows_ptr is not None:
            gradient_row = tl.load(gradient_rows_ptr + position, mask=inside, other=0)
            tl.store(sorted_gradient_rows_ptr + place, gradient_row.to(tl.int32), mask=inside)
        if scales_ptr is not None:
            scale = tl.load(scales_ptr + position, mask=inside, other=0.0)
            tl.store(sorted_scales_ptr + place, scale, mask=inside)


@triton.jit(do_not_specialize=["num_slots"])
def _rowwise_update_chunks_kernel(
    sums_ptr,
    chunk_starts_ptr,
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
    """``sums[j]`` = sum of the CHUNK gradients from sorted position ``chunk_starts[j]`` on.

    Example: CHUNK = 2, D = 1, gradients 1 2 3 4 5 6 7 in sorted order and
    ``chunk_starts = [1, 3, -1]``: slot 0 holds 2 + 3, slot 1 holds 4 + 5, slot 2 stays as it was.
    """
    slot = tl.program_id(0).to(INDEX) * BLOCK_SLOTS + tl.arange(0, BLOCK_SLOTS)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    start = tl.load(chunk_starts_ptr + slot, mask=slot < num_slots, other=-1).to(INDEX)
    is_whole = start >= 0
    total = sum_occurrences(
        tl.zeros([BLOCK_SLOTS, BLOCK_D], tl.float32),
        start,
        tl.where(is_whole, CHUNK, 0),
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
def add_chunks(
    total,
    start,
    length,
    chunk_sums_ptr,
    group_sums_ptr,
    columns,
    CHUNK: tl.constexpr,
    DIM: tl.constexpr,
    UNROLL: tl.constexpr,
    INDEX: tl.constexpr,
):
    """``total [N, C]`` plus the groups, then the chunks that are left, of runs."""
    slot, num_chunks = start // CHUNK, length // CHUNK
    if group_sums_ptr is not None:
        num_groups = num_chunks // CHUNK
        group = slot // CHUNK
        total = sum_occurrences(
            total, group, num_groups, group_sums_ptr, None, None, columns, DIM, UNROLL, INDEX
        )
        slot += num_groups * CHUNK
        num_chunks -= num_groups * CHUNK
    return sum_occurrences(
        total, slot, num_chunks, chunk_sums_ptr, None, None, columns, DIM, UNROLL, INDEX
    )


class SortedGradients(NamedTuple):
    """A batch's gradients in the order of its sorted positions, and the sums of chunks of them.

    The k-th chunk of run u is at ``starts[u] // CHUNK + k``, the k-th group of chunks that start at
    slot j is at ``j // CHUNK + k``.
    """

    chunk_sums: Tensor | None
    """Float32 ``[L // CHUNK, D]``; None where the batch has no room for a chunk."""
    group_sums: Tensor | None
    """Float32 ``[L // CHUNK**2, D]``; likewise."""
    grad: Tensor
    """``[G, D]``."""
    gradient_rows: Tensor
    """``[L]``, int32 or int64, into ``grad``."""
    scales: Tensor | None
    """``[L]``, float32; None: all ones."""


def sort_gradients(
    starts: Tensor,
    order: Tensor,
    num_runs: Tensor,
    grad: Tensor,
    gradient_rows: Tensor | None,
    scales: Tensor | None,
) -> SortedGradients:
    """Put the gradients of a batch's positions into sorted order, and sum their whole chunks."""
    num_ids, dim, device = order.numel(), grad.shape[1], grad.device
    num_chunks, num_groups = num_ids // CHUNK, num_ids // CHUNK**2
    chunk_starts, group_starts = (
        torch.empty(size, dtype=torch.int32, device=device) for size in (num_chunks, num_groups)
    )
    chunk_sums, group_sums = (
        torch.empty(size, dim, dtype=torch.float32, device=device) if size else None
        for size in (num_chunks, num_groups)
    )
    sorted_rows = order if gradient_rows is None else torch.empty_like(gradient_rows)
    sorted_scales = None if scales is None else torch.empty_like(scales)
    index = index_type(grad, order, chunk_sums)
    has_none_to_sort = gradient_rows is None and scales is None
    num_chunk_programs = triton.cdiv(num_chunks, _BLOCK)
    num_sort_programs = 0 if has_none_to_sort else triton.cdiv(num_ids, _BLOCK_POSITIONS)
    if num_chunk_programs + num_sort_programs:
        _rowwise_update_prepare_kernel[(num_chunk_programs + num_sort_programs,)](
            chunk_starts,
            group_starts,
            sorted_rows,
            sorted_scales,
            starts,
            order,
            num_runs,
            gradient_rows,
            scales,
            num_ids,
            num_chunks,
            num_groups,
            num_chunk_programs,
            CHUNK=CHUNK,
            BLOCK=_BLOCK,
            BLOCK_POSITIONS=_BLOCK_POSITIONS,
            INDEX=index,
        )
    if chunk_sums is not None:
        _sum_slots(chunk_sums, chunk_starts, grad, sorted_rows, sorted_scales, index)
        if group_sums is not None:
            _sum_slots(group_sums, group_starts, chunk_sums, None, None, index)
    return SortedGradients(chunk_sums, group_sums, grad, sorted_rows, sorted_scales)


def _sum_slots(
    sums: Tensor,
    chunk_starts: Tensor,
    grad: Tensor,
    gradient_rows: Tensor | None,
    scales: Tensor | None,
    index: tl.dtype,
) -> None:
    num_slots, dim = sums.shape
    block = row_block(dim, torch.float32, num_warps=_CHUNK_WARPS)
    grid = (triton.cdiv(num_slots, block.rows), triton.cdiv(dim, block.columns))
    _rowwise_update_chunks_kernel[grid](
        sums,
        chunk_starts,
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
        num_warps=_CHUNK_WARPS,
        enable_fp_fusion=False,
    )
