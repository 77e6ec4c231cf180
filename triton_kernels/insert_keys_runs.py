"""The Triton kernels that sort the keys of ``insert_keys`` and find their runs.

Positions are sorted by (table, hash), what is not to be inserted behind the rest. Equal keys are a
run then, and the runs of a block are neighbours.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.core.hash_tables import KeyInsertion
from torchembed.triton_kernels.hash_places import block_of_hash, hash_of_key
from torchembed.triton_kernels.launch_sizes import cdiv

_LEAST = tl.constexpr(-(2**63))
_BLOCK = 1024


class NewKeyRuns(NamedTuple):
    """Keys of a batch, sorted, and the runs of equal ones among those that are to be inserted."""

    order: Tensor
    """int64 ``[L]``: the position in the batch at each sorted position."""
    orders: Tensor
    """int8, int16 or int32 ``[L]``, by position in the batch: the table of a key that is to be
    inserted, and the number of tables for others."""
    runs: Tensor
    """int32 ``[2, L]``: the number, from 1 on, of the run and of the block at each sorted position.
    """
    run_starts: Tensor
    """int32 ``[L + 1]``: the sorted position at which each run starts, and the end of the last."""
    block_starts: Tensor
    """int32 ``[L + 1]``: the run with which each block starts, and the end of the last."""
    num_blocks: Tensor
    """int32 ``[1]``."""
    run_scores: Tensor | None
    """int64 ``[L]``: for each run the greatest score that the caller gave; None without them."""


@triton.jit(do_not_specialize=["num_ids", "num_tables"])
def _insert_keys_order_kernel(
    keys_ptr,
    tables_ptr,
    slots_ptr,
    wanted_ptr,
    is_trained_ptr,
    hashes_ptr,
    orders_ptr,
    num_ids,
    num_tables,
    BLOCK: tl.constexpr,
):
    """The numbers that positions are sorted by: ``orders``, the table of a key that is to be
    inserted and ``num_tables`` for others, then ``hashes``, less 2**63 so that signed numbers have
    the order.

    Example: two tables, ``tables = [1, -1, 0]``, ``slots = [-1, -1, 5]``: ``orders = [1, 2, 2]``.
    """
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < num_ids
    table = tl.load(tables_ptr + position, mask=inside, other=-1)
    slot = tl.load(slots_ptr + position, mask=inside, other=0)
    is_new = (table >= 0) & (slot < 0)
    if wanted_ptr is not None:
        is_new &= tl.load(wanted_ptr + position, mask=inside, other=0) != 0
    if is_trained_ptr is not None:
        is_new &= tl.load(is_trained_ptr) != 0
    key = tl.load(keys_ptr + position, mask=inside, other=0)
    hashed = hash_of_key(key).to(tl.int64, bitcast=True) ^ _LEAST
    tl.store(hashes_ptr + position, hashed, mask=inside)
    order = tl.where(is_new, table, num_tables)
    tl.store(orders_ptr + position, order.to(orders_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sorted_key(position, inside, order_ptr, orders_ptr, keys_ptr, geometry_ptr, num_tables):
    """The key at each sorted ``position``, its table, its block, and a mask of those that are to be
    inserted."""
    place = tl.load(order_ptr + position, mask=inside, other=0)
    table = tl.load(orders_ptr + place, mask=inside, other=0).to(tl.int64)
    is_new = inside & (table < num_tables)
    key = tl.load(keys_ptr + place, mask=is_new, other=0)
    num_blocks = tl.load(geometry_ptr + table * 4 + 1, mask=is_new, other=0)
    return place, key, table, block_of_hash(hash_of_key(key), num_blocks), is_new


@triton.jit(do_not_specialize=["num_ids", "num_tables"])
def _insert_keys_starts_kernel(
    order_ptr,
    orders_ptr,
    keys_ptr,
    geometry_ptr,
    starts_ptr,
    num_ids,
    num_tables,
    BLOCK: tl.constexpr,
):
    """``starts[0, i]``: 1 where a run of equal keys starts at sorted position i, ``starts[1, i]``
    where the runs of a block do.

    Example: keys 7 7 5 of one block in sorted order give 1 0 1 and 1 0 0.
    """
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < num_ids
    _, key, table, block, is_new = _sorted_key(
        position, inside, order_ptr, orders_ptr, keys_ptr, geometry_ptr, num_tables
    )
    _, key_before, table_before, block_before, _ = _sorted_key(
        position - 1,
        inside & (position > 0),
        order_ptr,
        orders_ptr,
        keys_ptr,
        geometry_ptr,
        num_tables,
    )
    is_first = is_new & ((position == 0) | (table != table_before))
    starts_run = is_first | (is_new & (key != key_before))
    starts_block = is_first | (is_new & (block != block_before))
    tl.store(starts_ptr + position, starts_run.to(tl.int32), mask=inside)
    tl.store(starts_ptr + num_ids + position, starts_block.to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["num_ids", "num_tables"])
def _insert_keys_runs_kernel(
    order_ptr,
    orders_ptr,
    runs_ptr,
    scores_in_ptr,
    run_starts_ptr,
    block_starts_ptr,
    run_scores_ptr,
    num_blocks_ptr,
    num_ids,
    num_tables,
    BLOCK: tl.constexpr,
):
    """From the numbers from 1 on of the runs, ``runs[0]``, and of the blocks, ``runs[1]``, at each
    sorted position: where each run starts, with which run each block does, and their ends.
    ``run_scores``: the greatest score that the caller gave for a key.

    Example: two positions of one run and one of the next, all of one block: ``runs = [[1, 1, 2],
    [1, 1, 1]]``, ``run_starts = [0, 2, 3]``, ``block_starts = [0, 2]``, ``num_blocks = 1``.
    """
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < num_ids
    place = tl.load(order_ptr + position, mask=inside, other=0)
    is_new = inside & (tl.load(orders_ptr + place, mask=inside, other=0).to(tl.int64) < num_tables)
    run = tl.load(runs_ptr + position, mask=is_new, other=0)
    block = tl.load(runs_ptr + num_ids + position, mask=is_new, other=0)
    has_before = is_new & (position > 0)
    run_before = tl.load(runs_ptr + position - 1, mask=has_before, other=0)
    block_before = tl.load(runs_ptr + num_ids + position - 1, mask=has_before, other=0)
    tl.store(run_starts_ptr + run - 1, position.to(tl.int32), mask=is_new & (run != run_before))
    tl.store(block_starts_ptr + block - 1, run - 1, mask=is_new & (block != block_before))

    has_next = is_new & (position + 1 < num_ids)
    next_place = tl.load(order_ptr + position + 1, mask=has_next, other=0)
    next_order = tl.load(orders_ptr + next_place, mask=has_next, other=0).to(tl.int64)
    is_last = is_new & ((position + 1 == num_ids) | (next_order >= num_tables))
    tl.store(run_starts_ptr + run, (position + 1).to(tl.int32), mask=is_last)
    tl.store(block_starts_ptr + block, run, mask=is_last)
    tl.store(num_blocks_ptr + tl.zeros_like(position), block, mask=is_last)
    if scores_in_ptr is not None:
        score = tl.load(scores_in_ptr + place, mask=is_new, other=0)
        tl.atomic_max(run_scores_ptr + run - 1, score, mask=is_new, sem="relaxed")


def _order_dtype(num_tables: int) -> torch.dtype:
    """The narrowest integer that holds ``num_tables``: the fewest bytes are sorted."""
    for dtype in (torch.int8, torch.int16):
        if num_tables <= torch.iinfo(dtype).max:
            return dtype
    return torch.int32


def launch_insert_keys_runs(insertion: KeyInsertion) -> NewKeyRuns:
    """The runs of the keys of ``insertion``, at least one key, on the current device."""
    keys = insertion.keys
    num_ids, num_tables = keys.numel(), insertion.geometry.shape[0]
    grid, sizes = (cdiv(num_ids, _BLOCK),), (num_ids, num_tables)
    hashes = torch.empty_like(keys, dtype=torch.int64)
    orders = torch.empty_like(keys, dtype=_order_dtype(num_tables))
    _insert_keys_order_kernel[grid](
        keys,
        insertion.tables,
        insertion.slots,
        insertion.wanted,
        insertion.is_trained,
        hashes,
        orders,
        *sizes,
        BLOCK=_BLOCK,
    )
    by_hash = torch.sort(hashes).indices
    order = by_hash[torch.sort(orders[by_hash], stable=True).indices]

    starts = keys.new_empty(2, num_ids, dtype=torch.int32)
    _insert_keys_starts_kernel[grid](
        order, orders, keys, insertion.geometry, starts, *sizes, BLOCK=_BLOCK
    )
    runs = torch.cumsum(starts, 1, dtype=torch.int32)
    run_starts, block_starts = keys.new_empty(2, num_ids + 1, dtype=torch.int32)
    num_blocks = keys.new_zeros(1, dtype=torch.int32)
    run_scores = None if insertion.scores_in is None else torch.full_like(keys, _LEAST.value)
    _insert_keys_runs_kernel[grid](
        order,
        orders,
        runs,
        insertion.scores_in,
        run_starts,
        block_starts,
        run_scores,
        num_blocks,
        *sizes,
        BLOCK=_BLOCK,
    )
    return NewKeyRuns(order, orders, runs, run_starts, block_starts, num_blocks, run_scores)
