"""The Triton kernels of ``find_runs``.

Torch's stable radix sort orders the rows; two kernels then find where runs start. Neither waits
for the host: every size follows from the number of ids.

Byte floor of the kernels: the sorted rows read twice, the permutation read as int64 and written as
int32, rows and starts of runs written once. The sort moves several times as much; rows that fit
int32 are sorted as int32, which halves its passes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.triton_kernels.row_blocks import index_type

_BLOCK = 1024


@triton.jit
def _starts_run(sorted_rows_ptr, position, num_ids):
    """The row at each sorted ``position``, and whether it is the first of its run."""
    row = tl.load(sorted_rows_ptr + position, mask=position < num_ids, other=-1)
    has_previous = (position > 0) & (position < num_ids)
    previous = tl.load(sorted_rows_ptr + position - 1, mask=has_previous, other=-1)
    return row, (row >= 0) & (row != previous)


@triton.jit
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


@triton.jit
def _find_runs_kernel(
    sorted_rows_ptr,
    sorted_order_ptr,
    counts_so_far_ptr,
    unique_rows_ptr,
    starts_ptr,
    order_ptr,
    num_runs_ptr,
    num_ids,
    num_blocks,
    BLOCK: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Run u starts at the u-th sorted position whose row is not -1 and differs from the one before.

    Example: sorted rows -1 2 2 5 | 5 7, ``counts_so_far`` 2 3: ``unique_rows`` 2 5 7 -1 -1 -1,
    ``starts`` 1 3 5 6 6 6 6, ``num_runs`` 3.
    """
    program = tl.program_id(0)
    position = program.to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    inside = position < num_ids
    row, first = _starts_run(sorted_rows_ptr, position, num_ids)
    count = first.to(tl.int32)
    runs_before = tl.load(counts_so_far_ptr + program) - tl.sum(count, axis=0)
    run = runs_before + tl.cumsum(count, axis=0) - 1
    tl.store(unique_rows_ptr + run, row.to(unique_rows_ptr.dtype.element_ty), mask=first)
    tl.store(starts_ptr + run, position.to(tl.int32), mask=first)

    order = tl.load(sorted_order_ptr + position, mask=inside, other=0)
    tl.store(order_ptr + position, order.to(tl.int32), mask=inside)

    # Slots that no run has: these, and those that runs write, are all of them.
    num_runs = tl.load(counts_so_far_ptr + num_blocks - 1)
    no_row = tl.full([BLOCK], -1, unique_rows_ptr.dtype.element_ty)
    tl.store(unique_rows_ptr + position, no_row, mask=inside & (position >= num_runs))
    no_start = tl.zeros([BLOCK], tl.int32) + num_ids
    has_slot = (position >= num_runs) & (position <= num_ids)
    tl.store(starts_ptr + position, no_start.to(tl.int32), mask=has_slot)
    if program == 0:
        tl.store(num_runs_ptr, num_runs)


def launch_find_runs(rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``torchembed::find_runs``; see :func:`torchembed.ops.segments.find_runs`."""
    num_ids, device = rows.numel(), rows.device
    unique_rows = torch.empty(num_ids, dtype=rows.dtype, device=device)
    order = torch.empty(num_ids, dtype=torch.int32, device=device)
    if num_ids == 0:
        starts = torch.zeros(1, dtype=torch.int32, device=device)
        return unique_rows, starts, order, torch.zeros_like(starts)
    starts = torch.empty(num_ids + 1, dtype=torch.int32, device=device)
    num_runs = torch.empty(1, dtype=torch.int32, device=device)
    keys = rows.to(torch.int32) if num_rows < 2**31 else rows
    sorted_rows, sorted_order = torch.sort(keys, stable=True)
    # One block more where L fills its blocks: ``starts`` has L + 1 slots.
    num_blocks = triton.cdiv(num_ids + 1, _BLOCK)
    counts = torch.empty(num_blocks, dtype=torch.int32, device=device)
    index = index_type(rows)
    with torch.cuda.device_of(rows):
        _find_runs_count_kernel[(num_blocks,)](
            sorted_rows, counts, num_ids, BLOCK=_BLOCK, INDEX=index
        )
        _find_runs_kernel[(num_blocks,)](
            sorted_rows,
            sorted_order,
            counts.cumsum(0, dtype=torch.int32),
            unique_rows,
            starts,
            order,
            num_runs,
            num_ids,
            num_blocks,
            BLOCK=_BLOCK,
            INDEX=index,
        )
    return unique_rows, starts, order, num_runs
