"""The gradient of a weight, ``grad.T @ x``, by programs that leave room on their multiprocessors."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.core import environment
from torchembed.triton_kernels.rounding import as_float32, round_to_nearest

_INTERPRETED = tl.constexpr(environment.triton_interpreted())


@triton.jit
def _product_gradient_kernel(
    grad_ptr,
    x_ptr,
    out_ptr,
    num_samples,
    num_rows,
    num_columns,
    grad_stride,
    x_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_SAMPLES: tl.constexpr,
):
    """``out[n, k] = sum(grad[b, n] * x[b, k])`` over samples b: ``3 * 2 + 1 * 5 = 11``."""
    num_tiles = tl.cdiv(num_columns, BLOCK_COLUMNS)
    rows = tl.program_id(0) // num_tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(0) % num_tiles * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    row_mask, column_mask = (rows < num_rows)[None, :], (columns < num_columns)[None, :]
    for first in range(0, num_samples, BLOCK_SAMPLES):
        samples = (first + tl.arange(0, BLOCK_SAMPLES))[:, None]
        inside = samples < num_samples
        grad = tl.load(
            grad_ptr + samples * grad_stride + rows[None, :], mask=inside & row_mask, other=0.0
        )
        x = tl.load(
            x_ptr + samples * x_stride + columns[None, :], mask=inside & column_mask, other=0.0
        )
        if _INTERPRETED:
            total += tl.dot(tl.trans(as_float32(grad)), as_float32(x), input_precision="ieee")
        else:
            total = tl.dot(tl.trans(grad), x, total)
    at = rows[:, None] * num_columns + columns[None, :]
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    tl.store(out_ptr + at, round_to_nearest(total, out_ptr.dtype.element_ty), mask=mask)


CONFIG = (128, 128, 64, 8, 3)


def product_gradient(grad: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
    num_samples, num_rows = grad.shape
    num_columns = x.shape[1]
    if out is None:
        out = grad.new_empty(num_rows, num_columns)
    rows, columns, depth, num_warps, num_stages = CONFIG
    tiles = triton.cdiv(num_rows, rows) * triton.cdiv(num_columns, columns)
    with torch.cuda.device_of(grad):
        _product_gradient_kernel[(tiles,)](
            grad,
            x,
            out,
            num_samples,
            num_rows,
            num_columns,
            grad.stride(0),
            x.stride(0),
            BLOCK_ROWS=rows,
            BLOCK_COLUMNS=columns,
            BLOCK_SAMPLES=depth,
            num_warps=num_warps,
            num_stages=num_stages,
        )
    return out
