"""Blocks of rows of a row-major matrix: their shape, and how programs load and store them."""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.triton_kernels.launch_sizes import next_power_of_2
from torchembed.triton_kernels.rounding import as_float32

NARROW_LIMIT = 2**31 - 2**20
"""Tensors of fewer elements than this are addressed in 32 bits. The margin is for addresses that a
program computes and then masks off: no block reaches 2**20 elements past the end."""

NUM_WARPS = 4

_NO_POLICY = tl.constexpr("")


def index_type(*tensors: Tensor | None) -> tl.dtype:
    """The integer type that addresses every element of ``tensors``: int32, or int64 where one is
    too large. Reads sizes only, so it serves on the meta device."""
    return index_type_below(max(0 if tensor is None else tensor.numel() for tensor in tensors))


def index_type_below(end: int) -> tl.dtype:
    """The integer type that addresses the elements before ``end``: int32, or int64 if need be."""
    return tl.int64 if end >= NARROW_LIMIT else tl.int32


class RowBlock(NamedTuple):
    """Shape of the block of a matrix that one program holds; both are powers of two."""

    rows: int
    columns: int


@functools.cache
def row_block(
    dim: int, *dtypes: torch.dtype, num_warps: int = NUM_WARPS, num_accesses: int = 1
) -> RowBlock:
    """A block of whole rows of ``dim`` elements, or of one row's part where they are long.

    Each thread holds ``num_accesses`` accesses of 16 bytes in the widest of ``dtypes``.
    """
    elements_per_thread = num_accesses * 16 // max(dtype.itemsize for dtype in dtypes)
    elements = num_warps * 32 * elements_per_thread
    columns = min(next_power_of_2(dim), elements)
    return RowBlock(elements // columns, columns)


@triton.jit
def column_block(BLOCK_D: tl.constexpr, VECTOR: tl.constexpr):
    """Columns ``[BLOCK_D]``, 0 1 2 ..., of which a thread takes VECTOR in one access.

    Left alone, the compiler gives all matrices of a program the layout that suits the narrowest
    dtype, and then reads a float32 row in halves of its sectors.
    """
    return tl.max_contiguous(tl.arange(0, BLOCK_D), VECTOR)


@triton.jit
def load_rows(
    matrix_ptr,
    row,
    inside,
    columns,
    DIM: tl.constexpr,
    INDEX: tl.constexpr,
    EVICT: tl.constexpr = _NO_POLICY,
):
    """Float32 ``[N, C]``: ``columns [C]`` of each ``row [N]`` of a matrix of width DIM.

    Zeros where a row is not ``inside [N]`` and in columns from DIM on. EVICT is a policy of
    :func:`triton.language.load`.
    """
    offset = row.to(INDEX)[:, None] * DIM + columns[None, :]
    mask = inside[:, None] & (columns < DIM)[None, :]
    return as_float32(tl.load(matrix_ptr + offset, mask=mask, other=0.0, eviction_policy=EVICT))


@triton.jit
def store_rows(
    matrix_ptr,
    row,
    inside,
    columns,
    value,
    DIM: tl.constexpr,
    INDEX: tl.constexpr,
    EVICT: tl.constexpr = _NO_POLICY,
):
    """Write ``value [N, C]``, already of the matrix's dtype, where :func:`load_rows` reads."""
    offset = row.to(INDEX)[:, None] * DIM + columns[None, :]
    mask = inside[:, None] & (columns < DIM)[None, :]
    tl.store(matrix_ptr + offset, value, mask=mask, eviction_policy=EVICT)
