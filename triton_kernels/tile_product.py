"""Tiles of matrix products in registers, for kernels with epilogues."""

import triton
import triton.language as tl

from torchembed.core import environment
from torchembed.triton_kernels.rounding import as_float32

_INTERPRETED = tl.constexpr(environment.triton_interpreted())


@triton.jit
def add_product(a, b, total, PRECISION: tl.constexpr):
    """``total + a @ b``, added up in float32; PRECISION is the ``input_precision`` of
    :func:`triton.language.dot`, for products of float32."""
    if _INTERPRETED:
        # The interpreter gets products of bfloat16 wrong.
        total += tl.dot(as_float32(a), as_float32(b), input_precision="ieee")
    else:
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


@triton.jit
def tile(num_columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """This program's tile of the product: its number among tiles of rows, its rows and columns."""
    # Tiles of one row of tiles are next to each other, so that the left factor stays in cache.
    num_tiles = tl.cdiv(num_columns, BLOCK_COLUMNS)
    row_tile = tl.program_id(0) // num_tiles
    column_tile = tl.program_id(0) % num_tiles
    rows = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return row_tile, rows, column_tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)


@triton.jit
def half_columns(num_columns, half: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """The columns of one half of this program's tile."""
    column_tile = tl.program_id(0) % tl.cdiv(num_columns, BLOCK_COLUMNS)
    first = column_tile * BLOCK_COLUMNS + half * (BLOCK_COLUMNS // 2)
    return first + tl.arange(0, BLOCK_COLUMNS // 2)


@triton.jit
def _product(
    a_ptr,
    b_ptr,
    rows,
    columns,
    num_rows,
    num_columns,
    B_BY_COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """A tile of ``a [B, DEPTH] @ b``, float32, in halves of its columns; b is ``[DEPTH, N]``, or
    ``[N, DEPTH]`` under B_BY_COLUMNS."""
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    row_mask = (rows < num_rows)[:, None]
    column_mask = (columns < num_columns)[None, :]
    for first in range(0, DEPTH, BLOCK_DEPTH):
        depth = first + tl.arange(0, BLOCK_DEPTH)
        a_mask, b_mask = row_mask, column_mask
        # Masks along the depth only where the last block is partial.
        if DEPTH % BLOCK_DEPTH != 0:
            a_mask = row_mask & (depth < DEPTH)[None, :]
            b_mask = column_mask & (depth < DEPTH)[:, None]
        a_at = rows[:, None].to(INDEX) * DEPTH + depth[None, :]
        a = tl.load(a_ptr + a_at, mask=a_mask, other=0.0)
        if B_BY_COLUMNS:
            b_at = columns[None, :].to(INDEX) * DEPTH + depth[:, None]
        else:
            b_at = depth[:, None].to(INDEX) * num_columns + columns[None, :]
        b = tl.load(b_ptr + b_at, mask=b_mask, other=0.0)
        total = add_product(a, b, total, "tf32")
    # tl.split divides the last dimension, so the two halves are moved there first.
    halves = tl.reshape(total, (BLOCK_ROWS, 2, BLOCK_COLUMNS // 2))
    return tl.split(tl.permute(halves, (0, 2, 1)))


@triton.jit
def _loaded_product(
    product_ptr,
    rows,
    num_rows,
    num_columns,
    INDEX: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """A tile of a finished product, in the same halves."""
    row_at, row_mask = rows[:, None].to(INDEX) * num_columns, (rows < num_rows)[:, None]
    left = half_columns(num_columns, 0, BLOCK_COLUMNS)[None, :]
    right = half_columns(num_columns, 1, BLOCK_COLUMNS)[None, :]
    return (
        tl.load(product_ptr + row_at + left, mask=row_mask & (left < num_columns), other=0.0),
        tl.load(product_ptr + row_at + right, mask=row_mask & (right < num_columns), other=0.0),
    )


@triton.jit
def product_halves(
    a_ptr,
    b_ptr,
    rows,
    columns,
    num_rows,
    num_columns,
    B_BY_COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """A tile of ``a [B, DEPTH] @ b``, float32, in two halves of its columns, since what is done
    with one of them needs fewer registers then. b is ``[DEPTH, N]``, or ``[N, DEPTH]`` under
    B_BY_COLUMNS; where it is None, a is the product."""
    if b_ptr is None:
        halves = _loaded_product(a_ptr, rows, num_rows, num_columns, INDEX, BLOCK_COLUMNS)
    else:
        halves = _product(
            a_ptr,
            b_ptr,
            rows,
            columns,
            num_rows,
            num_columns,
            B_BY_COLUMNS,
            DEPTH,
            INDEX,
            BLOCK_ROWS,
            BLOCK_COLUMNS,
            BLOCK_DEPTH,
        )
    return halves
