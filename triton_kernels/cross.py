"""Triton kernels of the ``cross_epilogue_*`` operations."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.triton_kernels.rounding import as_float32, round_to_nearest
from torchembed.triton_kernels.row_blocks import index_type

_BLOCK_ROWS = 8
_BLOCK_COLUMNS = 256
# Samples whose bias gradients one program sums. A constant, so that the order of the sum, and with
# it every bit, depends on the shape alone.
_ROWS_PER_PROGRAM = 128


@triton.jit
def _cross_epilogue_forward_kernel(
    x0_ptr,
    z_ptr,
    bias_ptr,
    x_ptr,
    out_ptr,
    num_rows,
    num_columns,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """``out = x0 * (z + bias) + x``: ``2 * (4 + 1) + 7 = 17``."""
    rows = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    at = rows[:, None] * num_columns + columns[None, :]
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    bias = as_float32(tl.load(bias_ptr + columns, mask=columns < num_columns, other=0.0))
    x0 = as_float32(tl.load(x0_ptr + at, mask=mask, other=0.0))
    z = as_float32(tl.load(z_ptr + at, mask=mask, other=0.0))
    x = as_float32(tl.load(x_ptr + at, mask=mask, other=0.0))
    out = x0 * (z + bias[None, :]) + x
    tl.store(out_ptr + at, round_to_nearest(out, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _cross_epilogue_backward_kernel(
    grad_ptr,
    x0_ptr,
    z_ptr,
    bias_ptr,
    grad_x0_ptr,
    grad_z_ptr,
    partial_bias_ptr,
    num_rows,
    num_columns,
    X_IS_X0: tl.constexpr,
    INDEX: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """``grad_x0 = grad * (z + bias)``, ``grad_z = grad * x0``, and the latter's sum over its rows.

    With ``grad = 3``, ``x0 = 2``, ``z = 4``, ``bias = 1``: 15, 6, and 6 towards the bias. Where x
    is x0, its own gradient is added: 18.
    """
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    column_mask = columns < num_columns
    bias = as_float32(tl.load(bias_ptr + columns, mask=column_mask, other=0.0))
    first_row = tl.program_id(0).to(INDEX) * ROWS_PER_PROGRAM
    # Programs write partial sums in place of adding to one with atomics, whose order is not fixed.
    sums = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for step in range(0, ROWS_PER_PROGRAM, BLOCK_ROWS):
        rows = first_row + step + tl.arange(0, BLOCK_ROWS)
        at = rows[:, None] * num_columns + columns[None, :]
        mask = (rows < num_rows)[:, None] & column_mask[None, :]
        grad = as_float32(tl.load(grad_ptr + at, mask=mask, other=0.0))
        x0 = as_float32(tl.load(x0_ptr + at, mask=mask, other=0.0))
        z = as_float32(tl.load(z_ptr + at, mask=mask, other=0.0))
        grad_x0 = grad * (z + bias[None, :])
        if X_IS_X0:
            # x enters the layer a second time, by the identity: its gradient is grad itself.
            grad_x0 += grad
        grad_z = grad * x0
        sums += grad_z  # before it is rounded
        grad_x0 = round_to_nearest(grad_x0, grad_x0_ptr.dtype.element_ty)
        grad_z = round_to_nearest(grad_z, grad_z_ptr.dtype.element_ty)
        tl.store(grad_x0_ptr + at, grad_x0, mask=mask)
        tl.store(grad_z_ptr + at, grad_z, mask=mask)
    partial = partial_bias_ptr + tl.program_id(0).to(INDEX) * num_columns + columns
    tl.store(partial, tl.sum(sums, axis=0), mask=column_mask)


def launch_cross_epilogue_forward(x0: Tensor, z: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """``torchembed::cross_epilogue_forward``; see :func:`torchembed.ops.cross.cross_epilogue`."""
    dtype = torch.promote_types(torch.promote_types(x0.dtype, z.dtype), x.dtype)
    out = torch.empty_like(x0, dtype=dtype)
    num_rows, num_columns = x0.shape
    if out.numel():
        grid = (triton.cdiv(num_rows, _BLOCK_ROWS), triton.cdiv(num_columns, _BLOCK_COLUMNS))
        with torch.cuda.device_of(x0):
            _cross_epilogue_forward_kernel[grid](
                x0,
                z,
                bias,
                x,
                out,
                num_rows,
                num_columns,
                INDEX=index_type(x0),
                BLOCK_ROWS=_BLOCK_ROWS,
                BLOCK_COLUMNS=_BLOCK_COLUMNS,
            )
    return out


def launch_cross_epilogue_backward(
    grad: Tensor, x0: Tensor, z: Tensor, bias: Tensor, x_is_x0: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``torchembed::cross_epilogue_backward``."""
    num_rows, num_columns = x0.shape
    grad_x0, grad_z = torch.empty_like(x0), torch.empty_like(z)
    num_partials = triton.cdiv(num_rows, _ROWS_PER_PROGRAM)
    partial_bias = torch.empty(num_partials, num_columns, device=x0.device, dtype=torch.float32)
    if grad.numel():
        grid = (num_partials, triton.cdiv(num_columns, _BLOCK_COLUMNS))
        with torch.cuda.device_of(x0):
            _cross_epilogue_backward_kernel[grid](
                grad,
                x0,
                z,
                bias,
                grad_x0,
                grad_z,
                partial_bias,
                num_rows,
                num_columns,
                X_IS_X0=x_is_x0,
                INDEX=index_type(x0),
                ROWS_PER_PROGRAM=_ROWS_PER_PROGRAM,
                BLOCK_ROWS=_BLOCK_ROWS,
                BLOCK_COLUMNS=_BLOCK_COLUMNS,
            )
    return grad_x0, grad_z, partial_bias.sum(0).to(bias.dtype)
