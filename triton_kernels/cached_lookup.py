"""The Triton kernel of ``cached_lookup``; those of many ids at once are in
:mod:`torchembed.triton_kernels.large_cached_lookup`.

Byte floor for each id: 180 bytes to find it, as in :mod:`torchembed.triton_kernels.find_slots`; a
sector of 32 bytes of its last use, read, and written once a call for each distinct row; its line
read once, and ``4 * dim + 9`` bytes written. Of 2,000 float32 rows of dim 128 these are 2.6 MB,
0.8 us at 3.35 TB/s: what takes time is the chain of some seven dependent accesses.
"""

# Kernels take plain numbers as tl.constexpr, which type checkers do not know.
# pyright: reportArgumentType=false

import torch
import triton
import triton.language as tl

from torchembed.core.cached_lookups import CachedLookup, LookupResults, empty_lookup
from torchembed.core.hash_tables import BUCKET_SLOTS
from torchembed.triton_kernels.cached_lines import line_layout, line_views, load_line
from torchembed.triton_kernels.find_slots import slots_of_keys
from torchembed.triton_kernels.large_cached_lookup import launch_large_cached_lookup
from torchembed.triton_kernels.launch_sizes import cdiv, next_power_of_2
from torchembed.triton_kernels.lookup_notes import finish_notes, note_uses

# From here on time is what memory and links take, not the chain of accesses and the launch.
_LARGE_IDS = 1 << 17
# Ids of a program: a bucket's digests of each are 16 bytes of each thread of 4 warps, and 2,000 ids
# fill an H100's 132 multiprocessors.
_BLOCK = 16
_MOST_COLUMNS = 128


@triton.jit(do_not_specialize=["num_ids"])
def _cached_lookup_kernel(
    keys_ptr,
    tables_ptr,
    digests_ptr,
    slot_keys_ptr,
    geometry_ptr,
    elements_ptr,
    scales_ptr,
    copies_ptr,
    copy_scales_ptr,
    copy_of_line_ptr,
    touched_ptr,
    epoch_ptr,
    counters_ptr,
    progress_ptr,
    rows_ptr,
    slots_ptr,
    is_missing_ptr,
    num_missing_ptr,
    num_ids,
    READS: tl.constexpr,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    FIRST: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    BUCKET: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """``slots[p]``: the slot of ``keys[p]`` in table ``tables[p]``, or the place behind the slots
    of that table; ``rows[p]``: the line there, or its copy.

    Example: the one of :func:`torchembed.ops.cached_lookup.cached_lookup`.
    """
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < num_ids
    key = tl.load(keys_ptr + position, mask=inside, other=0)
    table = tl.load(tables_ptr + position, mask=inside, other=-1)
    wanted = table >= 0
    shape_ptr = geometry_ptr + table.to(tl.int64) * 4
    first_slot = tl.load(shape_ptr, mask=wanted, other=0)
    num_blocks = tl.load(shape_ptr + 1, mask=wanted, other=0)
    num_buckets = tl.load(shape_ptr + 2, mask=wanted, other=0)
    num_slots = tl.load(shape_ptr + 3, mask=wanted, other=0)
    slot = slots_of_keys(
        key,
        wanted,
        first_slot,
        num_blocks,
        num_buckets,
        num_slots,
        digests_ptr,
        slot_keys_ptr,
        BUCKET,
    )
    is_hit = wanted & (slot >= 0)
    is_missing = wanted & (slot < 0)
    behind = first_slot + num_blocks * num_buckets * num_slots
    place = tl.where(is_missing, behind, slot)
    tl.store(slots_ptr + position, place, mask=inside)
    tl.store(is_missing_ptr + position, is_missing.to(tl.uint8), mask=inside)
    if READS:
        line = place
        is_far = wanted
        if copy_of_line_ptr is not None:
            copy = tl.load(copy_of_line_ptr + place, mask=wanted, other=-1).to(tl.int64)
            is_far = wanted & (copy < 0)
        for part in tl.static_range((DIM + BLOCK_D - 1) // BLOCK_D):
            column = part * BLOCK_D + tl.arange(0, BLOCK_D)
            in_row = column < DIM
            value = load_line(
                elements_ptr, scales_ptr, line, is_far, column, in_row, STRIDE, FIRST, IS_FLOAT8
            )
            if copy_of_line_ptr is not None:
                near = load_line(
                    copies_ptr,
                    copy_scales_ptr,
                    copy,
                    copy >= 0,
                    column,
                    in_row,
                    STRIDE,
                    FIRST,
                    IS_FLOAT8,
                )
                value = tl.where(is_far[:, None], value, near)
            out_ptr = rows_ptr + position[:, None] * DIM + column[None, :]
            tl.store(out_ptr, value, mask=inside[:, None] & in_row[None, :])

    note_uses(table, slot, is_hit, is_missing, counters_ptr, touched_ptr, epoch_ptr)
    num_missed = tl.sum(is_missing.to(tl.int64), axis=0)
    finish_notes(num_missed, progress_ptr, num_missing_ptr, epoch_ptr)


def launch_cached_lookup(call: CachedLookup) -> LookupResults:
    """``torchembed::cached_lookup``; see :func:`torchembed.ops.cached_lookup.cached_lookup`."""
    num_ids = call.keys.numel()
    if num_ids >= _LARGE_IDS:
        return launch_large_cached_lookup(call)
    results = empty_lookup(call.keys, call.dim, reads=call.reads)
    rows, slots, is_missing, num_missing = results
    with torch.cuda.device_of(call.keys):
        _cached_lookup_kernel[(max(1, cdiv(num_ids, _BLOCK)),)](
            call.keys,
            call.tables,
            call.digests,
            call.slot_keys,
            call.geometry,
            *line_views(call.lines, call.line_dtype),
            *line_views(call.copies, call.line_dtype),
            call.copy_of_line,
            call.touched,
            call.epoch,
            call.counters,
            call.progress,
            rows,
            slots,
            is_missing.view(torch.uint8),
            num_missing,
            num_ids,
            READS=call.reads,
            DIM=call.dim,
            **line_layout(call.lines, call.line_dtype)._asdict(),
            BUCKET=BUCKET_SLOTS,
            BLOCK=_BLOCK,
            BLOCK_D=min(next_power_of_2(call.dim), _MOST_COLUMNS),
        )
    return results
