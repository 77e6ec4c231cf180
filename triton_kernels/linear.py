"""Triton launchers of ``linear_relu_backward``, of ``linear_relu_input_backward`` and of
``sum_rows``, and the kernels of ``linear_to_one_*``, products of a matrix and a vector, for which
cuBLAS is slow.

Byte floor of ``linear_relu_backward``: gradient and output read, the product's gradient written,
once each; of ``linear_to_one_*``: x read once, and in backward its gradient written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.triton_kernels.column_sums import multiply_and_sum, sum_partials
from torchembed.triton_kernels.rounding import as_float32, round_to_nearest
from torchembed.triton_kernels.row_blocks import index_type


def launch_linear_relu_backward(grad: Tensor, output: Tensor, sums: Tensor) -> Tensor:
    """``torchembed::linear_relu_backward``; see :func:`torchembed.ops.linear.linear_relu`."""
    grad_product = torch.empty_like(output)
    multiply_and_sum(grad, output, grad_product, sums, rectify=True)
    return grad_product


def launch_linear_relu_input_backward(
    grad: Tensor, weight: Tensor, output: Tensor, sums: Tensor
) -> Tensor:
    """``torchembed::linear_relu_input_backward``; see
    :func:`torchembed.ops.linear.linear_relu_stack`."""
    return launch_linear_relu_backward(torch.mm(grad, weight), output, sums)


def launch_sum_rows(grad: Tensor, total: Tensor) -> None:
    """``torchembed::sum_rows``: ``total [N]`` becomes the sum over the rows of ``grad [B, N]``."""
    multiply_and_sum(grad, None, None, total)


@triton.jit
def _linear_to_one_forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_columns,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """``out[r] = sum(x[r] * weight) + bias``: ``[2, 3] * [4, 5] + 1 = 24``."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = rows < num_rows
    # Products are added up over columns only after the loop, so that threads need not communicate
    # within it.
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    first = 0
    while first < num_columns:
        columns = first + tl.arange(0, BLOCK_COLUMNS)
        column_mask = columns < num_columns
        at = rows[:, None].to(INDEX) * num_columns + columns[None, :]
        mask = inside[:, None] & column_mask[None, :]
        x = as_float32(tl.load(x_ptr + at, mask=mask, other=0.0))
        weight = as_float32(tl.load(weight_ptr + columns, mask=column_mask, other=0.0))
        total += x * weight[None, :]
        first += BLOCK_COLUMNS
    out = tl.sum(total, axis=1)
    if bias_ptr is not None:
        out += as_float32(tl.load(bias_ptr))
    tl.store(out_ptr + rows, round_to_nearest(out, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _linear_to_one_backward_kernel(
    grad_ptr,
    x_ptr,
    weight_ptr,
    grad_x_ptr,
    weight_sums_ptr,
    bias_sums_ptr,
    num_rows,
    num_columns,
    INDEX: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """``grad_x[r] = grad[r] * weight``, and for each program the sums of ``grad[r] * x[r]`` and of
    ``grad[r]`` over its rows.

    ``grad = [3, 1]``, ``x = [[2], [5]]`` and ``weight = [4]`` give ``[[12], [4]]``, 11 and 4.
    """
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    column_mask = columns < num_columns
    weight = as_float32(tl.load(weight_ptr + columns, mask=column_mask, other=0.0))
    first_row = tl.program_id(0) * ROWS_PER_PROGRAM
    weight_sums = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    bias_sums = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    for step in range(0, ROWS_PER_PROGRAM, BLOCK_ROWS):
        if first_row + step < num_rows:
            rows = first_row + step + tl.arange(0, BLOCK_ROWS)
            inside = rows < num_rows
            at = rows[:, None].to(INDEX) * num_columns + columns[None, :]
            mask = inside[:, None] & column_mask[None, :]
            grad = as_float32(tl.load(grad_ptr + rows, mask=inside, other=0.0))
            x = as_float32(tl.load(x_ptr + at, mask=mask, other=0.0))
            grad_x = grad[:, None] * weight[None, :]
            rounded = round_to_nearest(grad_x, grad_x_ptr.dtype.element_ty)
            tl.store(grad_x_ptr + at, rounded, mask=mask)
            weight_sums += grad[:, None] * x
            bias_sums += grad
    total = round_to_nearest(tl.sum(weight_sums, axis=0), weight_sums_ptr.dtype.element_ty)
    tl.store(weight_sums_ptr + tl.program_id(0) * num_columns + columns, total, mask=column_mask)
    if bias_sums_ptr is not None:
        # Every program of a row of blocks has the sum of its rows' gradients; the first writes it.
        if tl.program_id(1) == 0:
            bias = round_to_nearest(tl.sum(bias_sums, axis=0), bias_sums_ptr.dtype.element_ty)
            tl.store(bias_sums_ptr + tl.program_id(0), bias)


def launch_linear_to_one_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``torchembed::linear_to_one_forward``; see :func:`torchembed.ops.linear.linear`."""
    num_rows, num_columns = x.shape
    out = x.new_empty(num_rows, 1)
    block_rows = 16
    if num_rows:
        with torch.cuda.device_of(x):
            _linear_to_one_forward_kernel[(triton.cdiv(num_rows, block_rows),)](
                x,
                weight,
                bias,
                out,
                num_rows,
                num_columns,
                INDEX=index_type(x),
                BLOCK_ROWS=block_rows,
                BLOCK_COLUMNS=256,
                num_warps=4,
            )
    return out


def launch_linear_to_one_backward(
    grad: Tensor, x: Tensor, weight: Tensor, grad_weight: Tensor, grad_bias: Tensor | None
) -> Tensor:
    """``torchembed::linear_to_one_backward``."""
    num_rows, num_columns = x.shape
    grad_x = torch.empty_like(x)
    # Where there are few rows, one program sums whole columns, which spares a second kernel for
    # partial sums.
    rows_per_program = 1024 if num_rows <= 1024 else 256
    block_columns = 8 if num_rows <= 1024 else 64
    num_partials = triton.cdiv(num_rows, rows_per_program)
    totals = [(grad_weight, num_columns), (grad_bias, 1)]
    if num_partials == 0 or num_columns == 0:
        for total, _ in totals:
            if total is not None:
                total.zero_()
        return grad_x
    sums = [total for total, _ in totals]
    if num_partials > 1:
        sums = [
            None if total is None else total.new_empty(num_partials, width, dtype=torch.float32)
            for total, width in totals
        ]
    with torch.cuda.device_of(x):
        _linear_to_one_backward_kernel[(num_partials, triton.cdiv(num_columns, block_columns))](
            grad,
            x,
            weight,
            grad_x,
            *sums,
            num_rows,
            num_columns,
            INDEX=index_type(x),
            ROWS_PER_PROGRAM=rows_per_program,
            BLOCK_ROWS=256 if num_rows <= 1024 else 32,
            BLOCK_COLUMNS=block_columns,
            num_warps=4,
        )
    if num_partials > 1:
        for partials, (total, _) in zip(sums, totals, strict=True):
            if partials is not None and total is not None:
                sum_partials(partials, total)
    return grad_x
