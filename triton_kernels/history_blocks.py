"""Blocks of one head's rows of a history, in packed rows ``[L, H, D]``: how programs load and store
them.

Programs are numbered block by block of the rows, then by history, then by head.
"""

import triton
import triton.language as tl

from torchembed.triton_kernels.rounding import round_to_nearest


@triton.jit
def history_rows(offsets_ptr, num_histories, num_heads, max_length):
    """This program's history: its first row, and how many of its rows count."""
    history = tl.program_id(0) % (num_histories * num_heads) // num_heads
    start = tl.load(offsets_ptr + history).to(tl.int64)
    length = tl.minimum(tl.load(offsets_ptr + history + 1) - start, max_length)
    return start, length.to(tl.int32)


@triton.jit
def load_block(
    matrix_ptr,
    start,
    places,
    length,
    stride,
    num_heads,
    DIM: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """``[N, BLOCK_D]``: this program's head of a history's rows at ``places [N]``, zeros from row
    ``length`` and column DIM on."""
    # One address of 64 bits, and offsets from it, which take half the registers.
    matrix_ptr += start * stride + tl.program_id(0) % num_heads * DIM
    columns = tl.arange(0, BLOCK_D)
    at = places.to(INDEX)[:, None] * stride + columns[None, :]
    mask = (places < length)[:, None] & (columns < DIM)[None, :]
    return tl.load(matrix_ptr + at, mask=mask, other=0.0)


@triton.jit
def load_times(times_ptr, start, places, length):
    """int64 ``[N]``: times of a history's rows at ``places [N]``; zeros where there are none."""
    times = tl.zeros_like(places).to(tl.int64)
    if times_ptr is not None:
        times = tl.load(times_ptr + start + places, mask=places < length, other=0)
    return times


@triton.jit
def store_block(
    out_ptr,
    value,
    start,
    places,
    length,
    num_heads,
    DIM: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write float32 ``value`` to contiguous memory where :func:`load_block` reads."""
    out_ptr += (start * num_heads + tl.program_id(0) % num_heads) * DIM
    columns = tl.arange(0, BLOCK_D)
    at = places.to(INDEX)[:, None] * (num_heads * DIM) + columns[None, :]
    mask = (places < length)[:, None] & (columns < DIM)[None, :]
    tl.store(out_ptr + at, round_to_nearest(value, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_zeros(
    out_ptr,
    offsets_ptr,
    num_rows,
    num_histories,
    num_heads,
    max_length,
    DIM: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """This program's part of the rows that count for nothing: those of its history that are cut
    off, and those behind the last history."""
    zeros = tl.zeros((BLOCK, BLOCK_D), dtype=tl.float32)
    places = tl.arange(0, BLOCK)
    num_blocks = tl.cdiv(max_length, BLOCK).to(tl.int64)
    number = tl.program_id(0).to(tl.int64) // num_heads
    history = number % num_histories
    row = tl.load(offsets_ptr + history).to(tl.int64)
    row += max_length + number // num_histories * BLOCK
    end = tl.load(offsets_ptr + history + 1)
    while row < end:
        store_block(out_ptr, zeros, row, places, end - row, num_heads, DIM, INDEX, BLOCK_D)
        row += num_blocks * BLOCK
    row = tl.load(offsets_ptr + num_histories).to(tl.int64) + number * BLOCK
    while row < num_rows:
        store_block(out_ptr, zeros, row, places, num_rows - row, num_heads, DIM, INDEX, BLOCK_D)
        row += num_blocks * num_histories * BLOCK
