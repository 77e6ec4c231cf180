"""The Triton kernels of ``move_rows`` and ``read_rows``, which also access memory of the host.

Byte floor of moves: 20 bytes of each, and each row read once and written once, on the way to where
it is stored and back; of reads: the slot and the row of each id, each vector read once and written
once. Over a link to the host that is what its rate allows, as soon as some 64 KB are under way.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.core.row_caches import RowMove
from torchembed.triton_kernels.launch_sizes import cdiv, next_power_of_2
from torchembed.triton_kernels.row_blocks import NUM_WARPS, row_block

# Four loads of 16 bytes are in flight on each thread, in each direction.
_NUM_ACCESSES = 4
# Programs that share the moves: each has 8 KB in flight in each direction, so that these are enough
# for the link, and leave the other multiprocessors to what runs beside them.
_MOST_PROGRAMS = 64


@triton.jit
def _move_lines(
    cached_ptr,
    stored_ptr,
    slot,
    written_row,
    read_row,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the lines of each ``slot [N]`` to ``written_row [N]`` of what is stored, and read
    ``read_row [N]`` into it; a row of -1 is left out.

    Example: ``DIM = 1``, ``cached = [5, 6]``, ``stored = [7, 8]``, slot 1, written row 0, read row
    1: ``cached = [5, 8]``, ``stored = [6, 8]``.
    """
    for first_column in range(0, DIM, BLOCK_D):
        column = first_column + tl.arange(0, BLOCK_D)[None, :]
        inside = column < DIM
        line_ptr = cached_ptr + slot[:, None] * DIM + column
        is_written = (written_row >= 0)[:, None] & inside
        is_read = (read_row >= 0)[:, None] & inside
        old = tl.load(line_ptr, mask=is_written, other=0.0)
        new = tl.load(stored_ptr + read_row[:, None] * DIM + column, mask=is_read, other=0.0)
        # Another thread may store what this one has loaded.
        tl.debug_barrier()
        tl.store(stored_ptr + written_row[:, None] * DIM + column, old, mask=is_written)
        tl.store(line_ptr, new, mask=is_read)


@triton.jit
def _move_rows_kernel(
    slots_ptr,
    written_rows_ptr,
    read_rows_ptr,
    count_ptr,
    cached_ptrs,
    stored_ptrs,
    DIMS: tl.constexpr,
    BLOCK_MOVES: tl.constexpr,
    BLOCKS_D: tl.constexpr,
):
    """For each move before ``count`` and each j: ``stored[j][written_row] = cached[j][slot]``, then
    ``cached[j][slot] = stored[j][read_row]``; a row of -1 is left out. ``DIMS[j]`` elements are a
    row.

    Example: ``DIMS = (2, 1)``, ``cached = ([1, 2, 3, 4], [5, 6])``, ``stored = ([7, 8], [9])``, one
    move of slot 1, written row -1 and read row 0: ``cached = ([1, 2, 7, 8], [5, 9])``.
    """
    count = tl.load(count_ptr)
    first = tl.program_id(0).to(tl.int64) * BLOCK_MOVES
    while first < count:
        move = first + tl.arange(0, BLOCK_MOVES)
        inside = move < count
        slot = tl.load(slots_ptr + move, mask=inside, other=0).to(tl.int64)
        written_row = tl.load(written_rows_ptr + move, mask=inside, other=-1)
        read_row = tl.load(read_rows_ptr + move, mask=inside, other=-1)
        for pair in tl.static_range(len(DIMS)):
            _move_lines(
                cached_ptrs[pair],
                stored_ptrs[pair],
                slot,
                written_row,
                read_row,
                DIMS[pair],
                BLOCKS_D[pair],
            )
        first += tl.num_programs(0) * BLOCK_MOVES


@triton.jit(do_not_specialize=["num_ids"])
def _read_rows_kernel(
    cached_ptr,
    stored_ptr,
    slots_ptr,
    rows_ptr,
    out_ptr,
    num_ids,
    DIM: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """``out[p]``: ``cached[slots[p]]`` where that slot is not -1, else ``stored[rows[p]]``, zeros
    for row -1.

    Example: ``cached = [[1, 2]]``, ``stored = [[3, 4], [5, 6]]``, ``slots = [0, -1, -1]``, ``rows =
    [0, 1, -1]``: ``out = [[1, 2], [5, 6], [0, 0]]``.
    """
    position = tl.program_id(0).to(tl.int64) * BLOCK_IDS + tl.arange(0, BLOCK_IDS)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    inside = position < num_ids
    slot = tl.load(slots_ptr + position, mask=inside, other=-1).to(tl.int64)
    row = tl.load(rows_ptr + position, mask=inside, other=-1).to(tl.int64)
    in_row = column < DIM
    is_cached = (slot >= 0)[:, None]
    is_stored = (row >= 0)[:, None] & (is_cached == 0)
    near = tl.load(cached_ptr + slot[:, None] * DIM + column, mask=is_cached & in_row, other=0.0)
    far = tl.load(stored_ptr + row[:, None] * DIM + column, mask=is_stored & in_row, other=0.0)
    out = tl.where(is_cached, near, far)
    out_ptr += position[:, None] * DIM + column
    tl.store(out_ptr, out, mask=inside[:, None] & in_row)


class _MoveBlocks(NamedTuple):
    """Blocks in which the rows of several tensors are moved: as many rows of each."""

    dims: tuple[int, ...]
    """Elements of a row of each tensor."""
    moves: int
    columns: tuple[int, ...]
    """Elements of a block of each."""


def _move_blocks(tensors: list[Tensor]) -> _MoveBlocks:
    """The blocks of tensors whose rows are not empty: of the widest one as its rows want it."""
    dims = tuple(tensor[0].numel() for tensor in tensors)
    blocks = [
        row_block(dim, tensor.dtype, num_accesses=_NUM_ACCESSES)
        for dim, tensor in zip(dims, tensors, strict=True)
    ]
    num_moves = min(block.rows for block in blocks)
    columns = (
        min(block.rows * block.columns // num_moves, next_power_of_2(dim))
        for dim, block in zip(dims, blocks, strict=True)
    )
    return _MoveBlocks(dims, num_moves, tuple(columns))


def launch_move_rows(move: RowMove) -> None:
    """``torchembed::move_rows``; see :func:`torchembed.ops.row_cache.move_rows`."""
    num_moves = move.slots.numel()
    pairs = [
        (cached, stored)
        for cached, stored in zip(move.cached, move.stored, strict=True)
        if cached.numel() > 0 and stored.numel() > 0
    ]
    if num_moves == 0 or not pairs:
        return
    cached, stored = zip(*pairs, strict=True)
    blocks = _move_blocks(list(cached))
    with torch.cuda.device_of(move.slots):
        _move_rows_kernel[(min(cdiv(num_moves, blocks.moves), _MOST_PROGRAMS),)](
            move.slots,
            move.written_rows,
            move.read_rows,
            move.count,
            cached,
            stored,
            DIMS=blocks.dims,
            BLOCK_MOVES=blocks.moves,
            BLOCKS_D=blocks.columns,
            num_warps=NUM_WARPS,
        )


def launch_read_rows(cached: Tensor, stored: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    """``torchembed::read_rows``; see :func:`torchembed.ops.row_cache.read_rows`."""
    num_ids, dim = rows.numel(), cached.shape[1]
    out = cached.new_empty(num_ids, dim)
    if out.numel() == 0:
        return out
    block = row_block(dim, cached.dtype, num_accesses=_NUM_ACCESSES)
    with torch.cuda.device_of(rows):
        _read_rows_kernel[(cdiv(num_ids, block.rows), cdiv(dim, block.columns))](
            cached,
            stored,
            slots,
            rows,
            out,
            num_ids,
            DIM=dim,
            BLOCK_IDS=block.rows,
            BLOCK_D=block.columns,
            num_warps=NUM_WARPS,
        )
    return out
