"""The kernels of ``find_runs``.

A stable radix sort orders the rows: the library's own CUDA kernels, over only the bits that rows
use, or torch's where the library was built without them. Two Triton kernels then find the starts of
runs, and a third one which runs have whole chunks. Nothing waits for the host: every size
follows from the number of ids.

Byte floor of the Triton kernels: the sorted rows read twice, rows and starts of runs written once.
The sort moves several times as much, most of it within the second-level cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.core.types import RUN_CHUNK
from torchembed.triton_kernels.launch_sizes import cdiv
from torchembed.triton_kernels.row_blocks import index_type
from torchembed.triton_kernels.sort_rows import sort_rows

# Sorted positions that a program takes. More for many ids, since every program reads the counts of
# all programs.
_BLOCK = 1024
_LARGE_BLOCK = 2048
_MANY_IDS = 2**20
_BLOCK_WINDOWS = 128


@triton.jit
def _starts_run(sorted_rows_ptr, position, num_ids):
    """The row at each sorted ``position``, and a mask of those that begin a run."""
    row = tl.load(sorted_rows_ptr + position, mask=position < num_ids, other=-1)
    has_previous = (position > 0) & (position < num_ids)
    previous = tl.load(sorted_rows_ptr + position - 1, mask=has_previous, other=-1)
    return row, (row >= 0) & (row != previous)


@triton.jit(do_not_specialize=["num_ids"])
def _find_runs_count_kernel(
    sorted_rows_ptr, counts_ptr, num_ids, BLOCK: tl.constexpr, INDEX: tl.constexpr
):
    """``counts[i]``: the runs that start in the i-th block of sorted positions.

    Example: sorted rows -1 2 2 5 | 5 7 in blocks of 4 give counts 2 1.
    """
    program = tl.program_id(0)
    position = program.to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    _, first = _starts_run(sorted_rows_ptr, position, num_ids)
    tl.store(counts_ptr + program, tl.sum(first.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["num_ids", "num_blocks"])
def _find_runs_kernel(
    sorted_rows_ptr,
    sorted_order_ptr,
    counts_ptr,
    unique_rows_ptr,
    starts_ptr,
    order_ptr,
    num_runs_ptr,
    chunk_runs_ptr,
    num_ids,
    num_blocks,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Run u starts at the u-th sorted position whose row is not -1 and differs from the one before.
    ``chunk_runs[j]``: the run of sorted position ``(j + 1) * CHUNK - 1``, -1 where it has none.

    Example: CHUNK 2, sorted rows -1 2 2 5 | 5 7, ``counts`` 2 1: ``unique_rows`` 2 5 7 -1 -1 -1,
    ``starts`` 1 3 5 6 6 6 6, ``num_runs`` 3, ``chunk_runs`` 0 1 2. Where the sort's order is int32
    it is ``order`` already, and ``order_ptr`` None.
    """
    program = tl.program_id(0)
    # Each program adds up the counts of the others itself: a scan in a kernel of its own would cost
    # a launch, and a decoupled look-back would need programs to wait for each other.
    runs_before = 0
    num_runs = 0
    for first_block in range(0, num_blocks, BLOCK):
        block = first_block + tl.arange(0, BLOCK)
        counts = tl.load(counts_ptr + block, mask=block < num_blocks, other=0)
        runs_before += tl.sum(tl.where(block < program, counts, 0), axis=0)
        num_runs += tl.sum(counts, axis=0)

    position = program.to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    inside = position < num_ids
    row, first = _starts_run(sorted_rows_ptr, position, num_ids)
    run = runs_before + tl.cumsum(first.to(tl.int32), axis=0) - 1
    tl.store(unique_rows_ptr + run, row.to(unique_rows_ptr.dtype.element_ty), mask=first)
    tl.store(starts_ptr + run, position.to(tl.int32), mask=first)
    if order_ptr is not None:
        order = tl.load(sorted_order_ptr + position, mask=inside, other=0)
        tl.store(order_ptr + position, order.to(tl.int32), mask=inside)
    # A whole chunk that starts in a window of CHUNK positions holds the window's last one.
    ends_window = inside & (position % CHUNK == CHUNK - 1)
    tl.store(chunk_runs_ptr + position // CHUNK, run, mask=ends_window)

    # Entries from num_runs on belong to no run. Runs write the others, so every entry is written
    # once, and nothing has to be filled before.
    no_row = tl.full([BLOCK], -1, unique_rows_ptr.dtype.element_ty)
    tl.store(unique_rows_ptr + position, no_row, mask=inside & (position >= num_runs))
    no_start = tl.zeros([BLOCK], tl.int32) + num_ids
    has_no_run = (position >= num_runs) & (position <= num_ids)
    tl.store(starts_ptr + position, no_start.to(tl.int32), mask=has_no_run)
    if program == 0:
        tl.store(num_runs_ptr, num_runs)


@triton.jit(do_not_specialize=["num_windows"])
def _find_runs_chunks_kernel(
    chunk_runs_ptr,
    starts_ptr,
    num_windows,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Set ``chunk_runs[j]``, the run of the last position of window j, to -1 where that position is
    in no whole chunk of the run.

    Example: CHUNK 2, ``starts`` 1 3 5 6, ``chunk_runs`` 0 1 2: run 0 has the chunk [1, 3) and run 1
    has [3, 5), but run 2 is too short. ``chunk_runs`` becomes 0 1 -1.
    """
    window = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    last = window * CHUNK + (CHUNK - 1)
    run = tl.load(chunk_runs_ptr + window, mask=window < num_windows, other=-1)
    has_run = run >= 0
    start = tl.load(starts_ptr + run, mask=has_run, other=0)
    end = tl.load(starts_ptr + run + 1, mask=has_run, other=0)
    chunk_start = last - (last - start) % CHUNK
    is_partial = has_run & (chunk_start + CHUNK > end)
    tl.store(chunk_runs_ptr + window, tl.full([BLOCK], -1, tl.int32), mask=is_partial)


def launch_find_runs(rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``torchembed::find_runs``; see :func:`torchembed.ops.segments.find_runs`."""
    num_ids, device = rows.numel(), rows.device
    unique_rows = torch.empty(num_ids, dtype=rows.dtype, device=device)
    num_windows = num_ids // RUN_CHUNK
    chunk_runs = torch.empty(num_windows, dtype=torch.int32, device=device)
    if num_ids == 0:
        starts = torch.zeros(1, dtype=torch.int32, device=device)
        order = torch.empty_like(unique_rows, dtype=torch.int32)
        return unique_rows, starts, order, starts.clone(), chunk_runs
    starts = torch.empty(num_ids + 1, dtype=torch.int32, device=device)
    num_runs = torch.empty(1, dtype=torch.int32, device=device)
    # For L + 1 positions, since ``starts`` has L + 1 entries.
    block = _BLOCK if num_ids < _MANY_IDS else _LARGE_BLOCK
    num_blocks = cdiv(num_ids + 1, block)
    counts = torch.empty(num_blocks, dtype=torch.int32, device=device)
    index = index_type(rows)
    with torch.cuda.device_of(rows):
        sorted_rows, sorted_order = sort_rows(rows, num_rows)
        is_narrow = sorted_order.dtype == torch.int32
        order = sorted_order if is_narrow else torch.empty_like(sorted_order, dtype=torch.int32)
        _find_runs_count_kernel[(num_blocks,)](
            sorted_rows, counts, num_ids, BLOCK=block, INDEX=index
        )
        _find_runs_kernel[(num_blocks,)](
            sorted_rows,
            sorted_order,
            counts,
            unique_rows,
            starts,
            None if is_narrow else order,
            num_runs,
            chunk_runs,
            num_ids,
            num_blocks,
            CHUNK=RUN_CHUNK,
            BLOCK=block,
            INDEX=index,
        )
        if num_windows:
            _find_runs_chunks_kernel[(cdiv(num_windows, _BLOCK_WINDOWS),)](
                chunk_runs, starts, num_windows, CHUNK=RUN_CHUNK, BLOCK=_BLOCK_WINDOWS, INDEX=index
            )
    return unique_rows, starts, order, num_runs, chunk_runs
