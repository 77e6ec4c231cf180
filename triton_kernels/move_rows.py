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
# Programs that share the moves, and their warps: 32 KB of each are in flight both ways, so that
# these are enough for the link, and leave the other multiprocessors to what runs beside them. More
# of them are no faster: what limits them is the translation of the host's addresses.
_MOST_PROGRAMS = 16
_MOVE_WARPS = 16


@triton.jit
def _columns(part, BLOCK_D: tl.constexpr):
    """The columns ``[1, BLOCK_D]`` of part number ``part`` of a row; of part 2 of 4, 8 to 11."""
    return part * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def _move_rows_kernel(
    slots_ptr,
    written_rows_ptr,
    read_rows_ptr,
    count_ptr,
    cached_ptrs,
    stored_ptrs,
    DIMS: tl.constexpr,
    STRIDES: tl.constexpr,
    BLOCK_MOVES: tl.constexpr,
    BLOCKS_D: tl.constexpr,
    NUM_PARTS: tl.constexpr,
):
    """For each move before ``count`` and each j: ``stored[j][written_row] = cached[j][slot]``, then
    ``cached[j][slot] = stored[j][read_row]``; a row of -1 is left out. ``DIMS[j]`` elements are a
    row, and ``STRIDES[j]`` lie between the beginnings of two rows of ``stored[j]``. Rows are moved
    in ``NUM_PARTS`` parts, of ``BLOCKS_D[j]`` columns each.

    Example: ``DIMS = (2, 1)``, ``STRIDES = (3, 1)``, ``cached = ([1, 2, 3, 4], [5, 6])``,
    ``stored = ([0, 0, 0, 7, 8], [0, 9])``, one move of slot 1, written row 0 and read row 1:
    ``cached = ([1, 2, 7, 8], [5, 9])``, ``stored = ([3, 4, 0, 7, 8], [6, 9])``.
    """
    count = tl.load(count_ptr)
    first = tl.program_id(0).to(tl.int64) * BLOCK_MOVES
    while first < count:
        move = first + tl.arange(0, BLOCK_MOVES)
        inside = move < count
        slot = tl.load(slots_ptr + move, mask=inside, other=0).to(tl.int64)[:, None]
        written_row = tl.load(written_rows_ptr + move, mask=inside, other=-1)[:, None]
        read_row = tl.load(read_rows_ptr + move, mask=inside, other=-1)[:, None]
        for part in range(NUM_PARTS):
            old, new = (), ()
            for pair in tl.static_range(len(DIMS)):
                column = _columns(part, BLOCKS_D[pair])
                in_row = column < DIMS[pair]
                line_ptr = cached_ptrs[pair] + slot * DIMS[pair] + column
                far_ptr = stored_ptrs[pair] + read_row * STRIDES[pair] + column
                is_written, is_read = (written_row >= 0) & in_row, (read_row >= 0) & in_row
                # The compiler takes no list with an asterisk.
                old = old + (tl.load(line_ptr, mask=is_written, other=0.0),)  # noqa: RUF005
                new = new + (tl.load(far_ptr, mask=is_read, other=0.0),)  # noqa: RUF005
            # Another thread may store what this one has loaded.
            tl.debug_barrier()
            for pair in tl.static_range(len(DIMS)):
                column = _columns(part, BLOCKS_D[pair])
                in_row = column < DIMS[pair]
                line_ptr = cached_ptrs[pair] + slot * DIMS[pair] + column
                far_ptr = stored_ptrs[pair] + written_row * STRIDES[pair] + column
                tl.store(far_ptr, old[pair], mask=(written_row >= 0) & in_row)
                tl.store(line_ptr, new[pair], mask=(read_row >= 0) & in_row)
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
    STRIDE: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """``out[p]``: ``cached[slots[p]]`` where that slot is not -1, else ``stored[rows[p]]``, zeros
    for row -1. ``STRIDE`` elements lie between the beginnings of two rows of ``stored``.

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
    far = tl.load(stored_ptr + row[:, None] * STRIDE + column, mask=is_stored & in_row, other=0.0)
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
    num_parts: int
    """Blocks of the longest row."""


def _move_blocks(tensors: list[Tensor]) -> _MoveBlocks:
    """The blocks of tensors whose rows are not empty: of the widest one as its rows want it."""
    dims = tuple(tensor[0].numel() for tensor in tensors)
    blocks = [
        row_block(dim, tensor.dtype, num_warps=_MOVE_WARPS, num_accesses=_NUM_ACCESSES)
        for dim, tensor in zip(dims, tensors, strict=True)
    ]
    num_moves = min(block.rows for block in blocks)
    columns = tuple(
        min(block.rows * block.columns // num_moves, next_power_of_2(dim))
        for dim, block in zip(dims, blocks, strict=True)
    )
    num_parts = max(cdiv(dim, of_block) for dim, of_block in zip(dims, columns, strict=True))
    return _MoveBlocks(dims, num_moves, columns, num_parts)


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
            STRIDES=tuple(tensor.stride(0) for tensor in stored),
            BLOCK_MOVES=blocks.moves,
            BLOCKS_D=blocks.columns,
            NUM_PARTS=blocks.num_parts,
            num_warps=_MOVE_WARPS,
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
            STRIDE=stored.stride(0),
            BLOCK_IDS=block.rows,
            BLOCK_D=block.columns,
            num_warps=NUM_WARPS,
        )
    return out
