"""Triton kernels of the ``low_rank_cross_*`` operations: matrix products of small depth, with the
rest of a cross layer as their epilogue, in registers. In float32 cuBLAS is faster at the product,
so the kernels get the finished product then, and no second factor.

Byte floor of a layer of ``B`` samples and ``N`` columns, in passes over ``[B, N]``: forward reads
x0 and x and writes z and the output; backward reads the gradient and x0 and writes two gradients.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.triton_kernels.column_sums import multiply_and_sum, sum_partials
from torchembed.triton_kernels.rounding import as_float32, round_to_nearest
from torchembed.triton_kernels.row_blocks import index_type
from torchembed.triton_kernels.tile_product import half_columns, product_halves, tile


class _Tiling(NamedTuple):
    block_rows: int
    block_columns: int
    block_depth: int
    num_warps: int
    num_stages: int


def _tiling(num_rows: int, dtype: torch.dtype, num_read: int) -> _Tiling:
    """Tiling for an epilogue that reads ``num_read`` matrices.

    Two programs fit on a multiprocessor, or three smaller ones where the epilogue reads much, so
    that one computes while others read and write.
    """
    if dtype is torch.float32:
        return _Tiling(32, 128, 16, 4, 1)
    if num_rows > 1024 and num_read > 2:
        return _Tiling(64, 128, 64, 4, 3)
    return _Tiling(128, 128, 64, 8, 3)


@triton.jit
def _low_rank_cross_forward_kernel(
    x0_ptr,
    h_ptr,
    u_ptr,
    bias_ptr,
    x_ptr,
    out_ptr,
    z_ptr,
    num_rows,
    num_columns,
    DEPTH: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """``z = h @ u.T + bias`` and ``out = x0 * z + x``, x being x0 where None.

    With ``h = 3``, ``u = 1``, ``bias = 1``, ``x0 = 2``, ``x = 7``: ``z = 4`` and
    ``out = 2 * 4 + 7 = 15``.
    """
    _, rows, columns = tile(num_columns, BLOCK_ROWS, BLOCK_COLUMNS)
    halves = product_halves(
        h_ptr,
        u_ptr,
        rows,
        columns,
        num_rows,
        num_columns,
        True,
        DEPTH,
        INDEX,
        BLOCK_ROWS,
        BLOCK_COLUMNS,
        BLOCK_DEPTH,
    )
    for half in tl.static_range(2):
        z, columns = halves[half], half_columns(num_columns, half, BLOCK_COLUMNS)
        column_mask = columns < num_columns
        z += as_float32(tl.load(bias_ptr + columns, mask=column_mask, other=0.0))[None, :]
        at = rows[:, None].to(INDEX) * num_columns + columns[None, :]
        mask = (rows < num_rows)[:, None] & column_mask[None, :]
        x0 = as_float32(tl.load(x0_ptr + at, mask=mask, other=0.0))
        x = x0
        if x_ptr is not None:
            x = as_float32(tl.load(x_ptr + at, mask=mask, other=0.0))
        tl.store(z_ptr + at, round_to_nearest(z, z_ptr.dtype.element_ty), mask=mask)
        out = x0 * z + x
        tl.store(out_ptr + at, round_to_nearest(out, out_ptr.dtype.element_ty), mask=mask)
        # Keeps the compiler from loading the second half's operands before the first is done, which
        # would double the registers in use.
        tl.debug_barrier()


@triton.jit
def _low_rank_cross_backward_kernel(
    grad_ptr,
    grad_h_ptr,
    v_ptr,
    x0_ptr,
    grad_x_ptr,
    grad_z_ptr,
    partial_bias_ptr,
    num_rows,
    num_columns,
    DEPTH: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """``grad_x = grad + grad_h @ v``, ``grad_z = grad_x * x0``, and the latter's sum over rows.

    With ``grad = 3``, ``grad_h = 2``, ``v = 1``, ``x0 = 4``: ``grad_x = 5`` and ``grad_z = 20``.
    """
    row_tile, rows, columns = tile(num_columns, BLOCK_ROWS, BLOCK_COLUMNS)
    halves = product_halves(
        grad_h_ptr,
        v_ptr,
        rows,
        columns,
        num_rows,
        num_columns,
        False,
        DEPTH,
        INDEX,
        BLOCK_ROWS,
        BLOCK_COLUMNS,
        BLOCK_DEPTH,
    )
    for half in tl.static_range(2):
        grad_x, columns = halves[half], half_columns(num_columns, half, BLOCK_COLUMNS)
        column_mask = columns < num_columns
        at = rows[:, None].to(INDEX) * num_columns + columns[None, :]
        mask = (rows < num_rows)[:, None] & column_mask[None, :]
        grad_x += as_float32(tl.load(grad_ptr + at, mask=mask, other=0.0))
        x0 = as_float32(tl.load(x0_ptr + at, mask=mask, other=0.0))
        rounded = round_to_nearest(grad_x, grad_x_ptr.dtype.element_ty)
        tl.store(grad_x_ptr + at, rounded, mask=mask)
        grad_z = grad_x * x0
        rounded = round_to_nearest(grad_z, grad_z_ptr.dtype.element_ty)
        tl.store(grad_z_ptr + at, rounded, mask=mask)
        # Rows past the end hold zeros, so they add nothing to the sum.
        partial = partial_bias_ptr + row_tile * num_columns + columns
        tl.store(partial, tl.sum(grad_z, axis=0), mask=column_mask)
        tl.debug_barrier()  # as in the forward kernel


@triton.jit
def _store_part(
    part_ptr,
    value,
    rows,
    columns,
    mask,
    START: tl.constexpr,
    END: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Store the columns START to END of the whole matrix, as far as this tile has them."""
    inside = ((columns >= START) & (columns < END))[None, :] & mask
    at = rows[:, None].to(INDEX) * (END - START) + (columns - START)[None, :]
    tl.store(part_ptr + at, round_to_nearest(value, part_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _low_rank_cross_input_backward_kernel(
    grad_h_ptr,
    v_ptr,
    grad_ptrs,
    z_ptrs,
    part_ptrs,
    num_rows,
    num_columns,
    NUM_LAYERS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PART_STARTS: tl.constexpr,
    DEPTH: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """``grad_x0 = grad_h @ v + grad[0] + sum(grad[l] * z[l])`` over all layers l, and part p of it
    is columns PART_STARTS[p] to PART_STARTS[p + 1].

    With ``grad_h = 2``, ``v = 1``, ``grad = (3, 5)``, ``z = (4, 6)``: ``2 + 3 + 12 + 30 = 47``.
    """
    _, rows, columns = tile(num_columns, BLOCK_ROWS, BLOCK_COLUMNS)
    halves = product_halves(
        grad_h_ptr,
        v_ptr,
        rows,
        columns,
        num_rows,
        num_columns,
        False,
        DEPTH,
        INDEX,
        BLOCK_ROWS,
        BLOCK_COLUMNS,
        BLOCK_DEPTH,
    )
    for half in tl.static_range(2):
        total, columns = halves[half], half_columns(num_columns, half, BLOCK_COLUMNS)
        at = rows[:, None].to(INDEX) * num_columns + columns[None, :]
        mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
        for layer in tl.static_range(NUM_LAYERS):
            grad = as_float32(tl.load(grad_ptrs[layer] + at, mask=mask, other=0.0))
            if layer == 0:
                # x0 is also the first layer's input, which goes through it by the identity.
                total += grad
            total += grad * as_float32(tl.load(z_ptrs[layer] + at, mask=mask, other=0.0))
            tl.debug_barrier()  # one layer's operands in registers at a time
        # Each part of x0 has its own tensor; a tile may span several, which the masks tell apart.
        for part in tl.static_range(NUM_PARTS):
            _store_part(
                part_ptrs[part],
                total,
                rows,
                columns,
                mask,
                PART_STARTS[part],
                PART_STARTS[part + 1],
                INDEX,
            )


def _launch(
    kernel: triton.JITFunction,
    tiling: _Tiling,
    like: Tensor,
    inner: Tensor,
    *arguments: object,
    **flags: object,
) -> None:
    """Launch ``kernel`` over the tiles of ``like [B, N]``; ``inner [B, depth]`` is the product's
    left factor."""
    num_rows, num_columns = like.shape
    depth = inner.shape[1]
    tiles = triton.cdiv(num_rows, tiling.block_rows) * triton.cdiv(
        num_columns, tiling.block_columns
    )
    if tiles == 0:
        return
    with torch.cuda.device_of(inner):
        kernel[(tiles,)](
            *arguments,
            num_rows,
            num_columns,
            **flags,
            DEPTH=depth,
            INDEX=index_type(like, inner),
            BLOCK_ROWS=tiling.block_rows,
            BLOCK_COLUMNS=tiling.block_columns,
            # tl.dot needs a depth of 16 at least.
            BLOCK_DEPTH=min(tiling.block_depth, max(16, triton.next_power_of_2(depth))),
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )


def launch_low_rank_cross_forward(
    x0: Tensor, h: Tensor, u: Tensor, bias: Tensor, x: Tensor
) -> tuple[Tensor, Tensor]:
    """``torchembed::low_rank_cross_forward``; see
    :func:`torchembed.ops.cross.low_rank_cross_network`."""
    out, z = torch.empty_like(x0), torch.empty_like(x0)
    # The first layer's x is x0, which the kernel then reads once.
    is_first = x.data_ptr() == x0.data_ptr()
    factors = (h @ u.t(), None) if h.dtype is torch.float32 else (h, u)
    _launch(
        _low_rank_cross_forward_kernel,
        _tiling(x0.shape[0], x0.dtype, num_read=2),
        x0,
        h,
        x0,
        *factors,
        bias,
        None if is_first else x,
        out,
        z,
    )
    return out, z


def launch_low_rank_cross_scale(grad: Tensor, x0: Tensor, sums: Tensor) -> Tensor:
    """``torchembed::low_rank_cross_scale``."""
    grad_z = torch.empty_like(grad)
    multiply_and_sum(grad, x0, grad_z, sums)
    return grad_z


def _backward_factors(grad_h: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
    """Both factors of ``grad_h @ v``; or the product itself and None, in float32."""
    return (grad_h @ v, None) if grad_h.dtype is torch.float32 else (grad_h, v)


def launch_low_rank_cross_backward(
    grad: Tensor, grad_h: Tensor, v: Tensor, x0: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor]:
    """``torchembed::low_rank_cross_backward``."""
    grad_x, grad_z = torch.empty_like(grad), torch.empty_like(grad)
    num_rows, num_columns = grad.shape
    tiling = _tiling(num_rows, grad.dtype, num_read=2)
    num_partials = triton.cdiv(num_rows, tiling.block_rows)
    partials = sums
    if sums.dim() == 1:
        partials = torch.empty(num_partials, num_columns, device=grad.device, dtype=torch.float32)
    assert partials.shape[0] == num_partials, "partial sums are over the rows of a tile"
    _launch(
        _low_rank_cross_backward_kernel,
        tiling,
        grad,
        grad_h,
        grad,
        *_backward_factors(grad_h, v),
        x0,
        grad_x,
        grad_z,
        partials,
    )
    if not grad.numel():
        sums.zero_()
    elif partials is not sums:
        sum_partials(partials, sums)
    return grad_x, grad_z


def launch_low_rank_cross_input_backward(
    grad_h: Tensor, v: Tensor, grads: Sequence[Tensor], z: Sequence[Tensor], widths: Sequence[int]
) -> list[Tensor]:
    """``torchembed::low_rank_cross_input_backward``."""
    num_rows = grads[0].shape[0]
    parts = [grad_h.new_empty(num_rows, width) for width in widths]
    _launch(
        _low_rank_cross_input_backward_kernel,
        _tiling(num_rows, grad_h.dtype, num_read=2 * len(z)),
        grads[0],
        grad_h,
        *_backward_factors(grad_h, v),
        tuple(grads),
        tuple(z),
        tuple(parts),
        NUM_LAYERS=len(z),
        NUM_PARTS=len(parts),
        PART_STARTS=tuple(itertools.accumulate(widths, initial=0)),
    )
    return parts
