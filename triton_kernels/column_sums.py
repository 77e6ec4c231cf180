"""Sums over the rows of a matrix, for gradients of biases: float32, in an order that its shape
fixes; alone, or in the pass that makes the matrix."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.triton_kernels.rounding import as_float32, round_to_nearest
from torchembed.triton_kernels.row_blocks import index_type


class _Tiling(NamedTuple):
    rows_per_program: int
    block_rows: int
    block_columns: int
    num_warps: int


def _tiling(num_rows: int, *, are_apart: bool) -> _Tiling:
    """Tiling for a matrix of ``num_rows``; ``are_apart`` where partial sums are wanted as they are.

    Where there are few rows, one program sums whole columns, so that no second kernel adds partial
    sums. Where these are wanted, a program takes the 128 rows of one, in a single block.
    """
    if num_rows > 1024:
        return _Tiling(128, 32, 128, 4)
    if are_apart:
        return _Tiling(128, 128, 32, 4)
    rows = max(64, triton.next_power_of_2(num_rows))
    return _Tiling(rows, rows, 16, max(4, rows // 64))


@triton.jit
def _multiply_and_sum_kernel(
    matrix_ptr,
    factor_ptr,
    product_ptr,
    sums_ptr,
    num_rows,
    num_columns,
    matrix_stride,
    RECTIFY: tl.constexpr,
    INDEX: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """``product = matrix * factor``, or ``matrix * (factor > 0)`` under RECTIFY, and for each
    program the sum of its rows; without a factor only the sum.

    ``matrix = [[3], [4]]`` and ``factor = [[-1], [2]]`` give ``[[-3], [8]]`` and 5, or ``[[0],
    [4]]`` and 4 under RECTIFY.
    """
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    column_mask = columns < num_columns
    first_row = tl.program_id(0) * ROWS_PER_PROGRAM
    # One sum for each row of the block, added up only after the loop, so that threads need not
    # communicate within it.
    sums = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for step in range(0, ROWS_PER_PROGRAM, BLOCK_ROWS):
        # Blocks past the end would read nothing; leaving them out spares the loop's body.
        if first_row + step < num_rows:
            rows = first_row + step + tl.arange(0, BLOCK_ROWS)
            at = rows[:, None].to(INDEX) * num_columns + columns[None, :]
            mask = (rows < num_rows)[:, None] & column_mask[None, :]
            matrix_at = rows[:, None].to(INDEX) * matrix_stride + columns[None, :]
            value = as_float32(tl.load(matrix_ptr + matrix_at, mask=mask, other=0.0))
            if factor_ptr is not None:
                factor = as_float32(tl.load(factor_ptr + at, mask=mask, other=0.0))
                if RECTIFY:
                    value = tl.where(factor > 0, value, 0.0)
                else:
                    value = value * factor
                rounded = round_to_nearest(value, product_ptr.dtype.element_ty)
                tl.store(product_ptr + at, rounded, mask=mask)
            # Before rounding, so that the sum has float32's precision.
            sums += value
    # Where this program's sum is the whole, sums_ptr is the result itself, in its own dtype.
    total = round_to_nearest(tl.sum(sums, axis=0), sums_ptr.dtype.element_ty)
    tl.store(sums_ptr + tl.program_id(0) * num_columns + columns, total, mask=column_mask)


def multiply_and_sum(
    matrix: Tensor,
    factor: Tensor | None,
    product: Tensor | None,
    total: Tensor,
    *,
    rectify: bool = False,
) -> None:
    """Write ``matrix * factor`` to ``product``, or ``matrix * (factor > 0)``, all ``[B, N]``, and
    its sum over rows, before it is rounded, to ``total [N]``; without a factor only the sum. Into
    float32 ``total [P, N]`` go the sums over 128 rows each.

    All are contiguous, but ``matrix`` may have gaps between its rows, as a slice of columns has.
    """
    num_rows, num_columns = matrix.shape
    if num_rows == 0 or num_columns == 0:
        total.zero_()
        return
    are_apart = total.dim() == 2
    tiling = _tiling(num_rows, are_apart=are_apart)
    num_partials = triton.cdiv(num_rows, tiling.rows_per_program)
    sums = total
    if num_partials > 1 and not are_apart:
        sums = torch.empty(num_partials, num_columns, device=matrix.device, dtype=torch.float32)
    grid = (num_partials, triton.cdiv(num_columns, tiling.block_columns))
    with torch.cuda.device_of(matrix):
        _multiply_and_sum_kernel[grid](
            matrix,
            factor,
            product,
            sums,
            num_rows,
            num_columns,
            matrix.stride(0),
            RECTIFY=rectify,
            # Rows with gaps between them may reach further than the number of elements tells.
            INDEX=index_type(matrix) if matrix.is_contiguous() else tl.int64,
            ROWS_PER_PROGRAM=tiling.rows_per_program,
            BLOCK_ROWS=tiling.block_rows,
            BLOCK_COLUMNS=tiling.block_columns,
            num_warps=tiling.num_warps,
        )
    if sums is not total:
        sum_partials(sums, total)


@triton.jit
def _sum_partials_kernel(
    partials_ptr,
    total_ptr,
    num_rows,
    num_columns,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """``total[c] = sum(partials[:, c])``: ``[[1, 2], [3, 4]]`` gives ``[4, 6]``."""
    columns = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = columns < num_columns
    sums = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    first = 0
    while first < num_rows:
        rows = first + tl.arange(0, BLOCK_ROWS)
        at = rows[:, None].to(tl.int64) * num_columns + columns[None, :]
        mask = (rows < num_rows)[:, None] & inside[None, :]
        sums += tl.load(partials_ptr + at, mask=mask, other=0.0)
        first += BLOCK_ROWS
    total = round_to_nearest(tl.sum(sums, axis=0), total_ptr.dtype.element_ty)
    tl.store(total_ptr + columns, total, mask=inside)


def sum_partials(partials: Tensor, total: Tensor) -> None:
    """Write the sum over the rows of float32 ``partials [P, N]`` to ``total [N]``:
    ``torchembed::sum_partials``."""
    num_rows, num_columns = partials.shape
    block_columns = 32
    if num_columns == 0:
        return
    with torch.cuda.device_of(partials):
        _sum_partials_kernel[(triton.cdiv(num_columns, block_columns),)](
            partials,
            total,
            num_rows,
            num_columns,
            BLOCK_ROWS=64,
            BLOCK_COLUMNS=block_columns,
            num_warps=4,
        )
