"""The Triton kernels of ``cached_lookup`` for many ids at once.

Programs that find ids, note their uses and read their rows, all in one, would wait for the same few
addresses, and read lines of the host in no order, at little more than half the rate that the link
has for lines in order. So slots are found first; then uses are noted, by few programs; and then
lines are read, those without a copy by programs of their own, in the order of regions.

Byte floor for each id: that of :mod:`torchembed.triton_kernels.find_slots` and 17 bytes more of its
slot; a sector of 32 bytes of its last use, and one of the place of its copy; its line read once,
and ``4 * dim`` bytes written; 32 bytes more where it has no copy. A million float32 rows of dim 128
with copies are 1.3 GB, 0.3 ms at 4.8 TB/s; 150,000 without are 80 MB, 1.7 ms at 46 GB/s.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.core.cached_lookups import CachedLookup, LookupResults, empty_lookup
from torchembed.triton_kernels.cached_lines import line_layout, line_views, load_line
from torchembed.triton_kernels.find_slots import find_slots_into
from torchembed.triton_kernels.launch_sizes import cdiv
from torchembed.triton_kernels.lookup_notes import finish_notes, note_uses
from torchembed.triton_kernels.row_blocks import NUM_WARPS, row_block

# Few programs note uses: those that begin together all find that frequent rows are not noted yet.
_NOTED_BLOCK = 512
_NOTING_PROGRAMS = 264
# A link translates addresses within a region nearly as fast as those in order. Not more regions
# than this, since the ends of all are summed.
_REGION_BYTES = 1 << 25
_MOST_REGIONS_LOG2 = 10
# Counters of a region, for ids of different programs: additions to one counter come one by one.
_SHARES = tl.constexpr(16)
# Programs that read from the host: with 8 KB each under way, twice what a link needs.
_FAR_PROGRAMS = 128
# Four accesses of 16 bytes by each thread.
_NUM_ACCESSES = 4


@triton.jit
def _share_of_region(line, position, REGION_BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Which share of its region each ``line [N]``, of id ``position [N]``, is counted in: shares of
    a region are neighbours, and ids of a BLOCK of positions that read one region have one share.

    Example: regions of 4 lines, blocks of 8: line 5 of id 17 is in share 18, the third of region 1.
    """
    return (line >> REGION_BITS) * _SHARES + position // BLOCK % _SHARES


@triton.jit(do_not_specialize=["num_ids"])
def _large_cached_lookup_note_kernel(
    tables_ptr,
    geometry_ptr,
    copy_of_line_ptr,
    touched_ptr,
    epoch_ptr,
    counters_ptr,
    progress_ptr,
    slots_ptr,
    is_missing_ptr,
    num_missing_ptr,
    copies_ptr,
    counts_ptr,
    num_ids,
    REGION_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Note what a lookup notes of ``slots``, and make those of ids that have none, -1, the place
    behind the slots of their table. ``copies[p]``: the place of the copy that id p reads; -1 where
    there is no id; where the line has no copy, -2 less the number of those that its share of a
    region counted before it.

    Example: one table of slots 0 to 3, of which line 0 has copy 5, ``slots = [0, -1, 2]``, tables
    0 0 -1: ``slots = [0, 4, -1]``, ``copies = [5, -2, -1]``, and a hit and a miss of table 0.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    num_missed = tl.full([], 0, tl.int64)
    while first < num_ids:
        position = first + tl.arange(0, BLOCK)
        inside = position < num_ids
        table = tl.load(tables_ptr + position, mask=inside, other=-1)
        slot = tl.load(slots_ptr + position, mask=inside, other=-1)
        is_id = table >= 0
        is_hit, is_missing = is_id & (slot >= 0), is_id & (slot < 0)
        shape_ptr = geometry_ptr + table.to(tl.int64) * 4
        behind = tl.load(shape_ptr, mask=is_missing, other=0)
        num_blocks = tl.load(shape_ptr + 1, mask=is_missing, other=0)
        num_buckets = tl.load(shape_ptr + 2, mask=is_missing, other=0)
        behind += num_blocks * num_buckets * tl.load(shape_ptr + 3, mask=is_missing, other=0)
        line = tl.where(is_missing, behind, slot)
        tl.store(slots_ptr + position, behind, mask=is_missing)
        tl.store(is_missing_ptr + position, is_missing.to(tl.uint8), mask=inside)
        if copies_ptr is not None:
            copy = tl.load(copy_of_line_ptr + line, mask=is_id, other=0)
            is_far = is_id & (copy < 0)
            share = _share_of_region(line, position, REGION_BITS, BLOCK)
            one = tl.full([BLOCK], 1, tl.int32)
            num_before = tl.atomic_add(counts_ptr + share, one, mask=is_far, sem="relaxed")
            copy = tl.where(is_far, -2 - num_before, tl.where(is_id, copy, -1))
            tl.store(copies_ptr + position, copy, mask=inside)
        note_uses(table, slot, is_hit, is_missing, counters_ptr, touched_ptr, epoch_ptr)
        num_missed += tl.sum(is_missing.to(tl.int64), axis=0)
        first += tl.num_programs(0) * BLOCK
    finish_notes(num_missed, progress_ptr, num_missing_ptr, epoch_ptr)


@triton.jit(do_not_specialize=["num_ids"])
def _large_cached_lookup_list_kernel(
    slots_ptr,
    copies_ptr,
    ends_ptr,
    far_ids_ptr,
    num_ids,
    REGION_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``far_ids``: the ids whose lines have no copy, region by region. ``ends`` says where those of
    each share end.

    Example: regions of 4 lines, ``slots = [5, 1, 6]``, ``copies = [-2, -2, -3]``, ``ends`` 1 for
    the shares of region 0 and 3 for those of region 1: ``far_ids = [1, 0, 2]``.
    """
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    copy = tl.load(copies_ptr + position, mask=position < num_ids, other=-1)
    is_far = copy < -1
    line = tl.load(slots_ptr + position, mask=is_far, other=0)
    share = _share_of_region(line, position, REGION_BITS, BLOCK)
    start = tl.load(ends_ptr + share - 1, mask=is_far & (share > 0), other=0)
    tl.store(far_ids_ptr + start - 2 - copy, position.to(tl.int32), mask=is_far)


@triton.jit
def _copy_rows(
    rows_ptr,
    position,
    is_written,
    elements_ptr,
    scales_ptr,
    line,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    FIRST: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """``rows[position]``, where it ``is_written``: each ``line``, zeros where that is below 0.

    Example: lines 3 4, positions 0 1 2, lines 1 -1 0, all but the last one written: ``rows = [4, 0,
    ...]``.
    """
    for part in tl.static_range((DIM + BLOCK_D - 1) // BLOCK_D):
        column = part * BLOCK_D + tl.arange(0, BLOCK_D)
        in_row = column < DIM
        value = load_line(
            elements_ptr, scales_ptr, line, line >= 0, column, in_row, STRIDE, FIRST, IS_FLOAT8
        )
        out_ptr = rows_ptr + position[:, None] * DIM + column[None, :]
        tl.store(out_ptr, value, mask=is_written[:, None] & in_row[None, :])


@triton.jit(do_not_specialize=["num_ids"])
def _large_cached_lookup_read_kernel(
    elements_ptr,
    scales_ptr,
    near_elements_ptr,
    near_scales_ptr,
    near_lines_ptr,
    slots_ptr,
    far_ids_ptr,
    num_far_ptr,
    rows_ptr,
    num_ids,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    FIRST: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    FAR_PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """``rows[p]``: line ``slots[p]`` where p is one of the ``num_far`` ids ``far_ids``, which the
    first FAR_PROGRAMS read, together and in order. The others read line ``near_lines[p]`` of those
    that are near, and write zeros where that is -1 and nothing where it is less.

    Example: lines 1 2, near ones 3 4, ``near_lines = [1, -1, -2]``, ``slots = [0, -1, 1]``, and id
    2 is far: ``rows = [4, 0, 2]``.
    """
    program = tl.program_id(0).to(tl.int64)
    if FAR_PROGRAMS > 0:
        if program < FAR_PROGRAMS:
            num_far = tl.load(num_far_ptr)
            first = program * BLOCK
            while first < num_far:
                entry = first + tl.arange(0, BLOCK)
                inside = entry < num_far
                position = tl.load(far_ids_ptr + entry, mask=inside, other=0).to(tl.int64)
                line = tl.load(slots_ptr + position, mask=inside, other=-1)
                _copy_rows(
                    rows_ptr,
                    position,
                    inside,
                    elements_ptr,
                    scales_ptr,
                    line,
                    DIM,
                    STRIDE,
                    FIRST,
                    IS_FLOAT8,
                    BLOCK_D,
                )
                first += FAR_PROGRAMS * BLOCK
    if program >= FAR_PROGRAMS:
        position = (program - FAR_PROGRAMS) * BLOCK + tl.arange(0, BLOCK)
        line = tl.load(near_lines_ptr + position, mask=position < num_ids, other=-2).to(tl.int64)
        _copy_rows(
            rows_ptr,
            position,
            line >= -1,
            near_elements_ptr,
            near_scales_ptr,
            line,
            DIM,
            STRIDE,
            FIRST,
            IS_FLOAT8,
            BLOCK_D,
        )


def _region_bits(lines: Tensor) -> int:
    """How many bits count the lines of a region."""
    num_lines, num_bytes = lines.shape
    in_bytes = (_REGION_BYTES // num_bytes).bit_length() - 1
    return max(0, in_bytes, (num_lines - 1).bit_length() - _MOST_REGIONS_LOG2)


def launch_large_cached_lookup(call: CachedLookup) -> LookupResults:
    """``torchembed::cached_lookup`` of at least one id;
    see :func:`torchembed.ops.cached_lookup.cached_lookup`."""
    results = empty_lookup(call.keys, call.dim, reads=call.reads)
    rows, slots, is_missing, num_missing = results
    num_ids, num_lines = call.keys.numel(), call.lines.shape[0]
    sizes = {"REGION_BITS": _region_bits(call.lines), "BLOCK": _NOTED_BLOCK}
    num_blocks = cdiv(num_ids, _NOTED_BLOCK)
    copies = counts = far_ids = num_far = None
    with torch.cuda.device_of(call.keys):
        find_slots_into(slots, *call[:5])
        if call.reads and call.copies is not None:
            # Where there are no tables there are no lines, and still the last end is read.
            num_regions = max(1, cdiv(num_lines, 1 << sizes["REGION_BITS"]))
            counts = slots.new_zeros(num_regions * _SHARES.value, dtype=torch.int32)
            copies, far_ids = slots.new_empty(2, num_ids, dtype=torch.int32)
        _large_cached_lookup_note_kernel[(min(num_blocks, _NOTING_PROGRAMS),)](
            call.tables,
            call.geometry,
            call.copy_of_line,
            call.touched,
            call.epoch,
            call.counters,
            call.progress,
            slots,
            is_missing.view(torch.uint8),
            num_missing,
            copies,
            counts,
            num_ids,
            **sizes,
        )
        if not call.reads:
            return results
        if counts is not None:
            ends = torch.cumsum(counts, 0, dtype=torch.int32)
            num_far = ends[-1:]
            _large_cached_lookup_list_kernel[(num_blocks,)](
                slots, copies, ends, far_ids, num_ids, **sizes
            )
        block = row_block(call.dim, torch.float32, num_accesses=_NUM_ACCESSES)
        num_far_programs = 0 if far_ids is None else _FAR_PROGRAMS
        near = call.lines if call.copies is None else call.copies
        _large_cached_lookup_read_kernel[(num_far_programs + cdiv(num_ids, block.rows),)](
            *line_views(call.lines, call.line_dtype),
            *line_views(near, call.line_dtype),
            slots if copies is None else copies,
            slots,
            far_ids,
            num_far,
            rows,
            num_ids,
            DIM=call.dim,
            **line_layout(call.lines, call.line_dtype)._asdict(),
            FAR_PROGRAMS=num_far_programs,
            BLOCK=block.rows,
            BLOCK_D=block.columns,
            num_warps=NUM_WARPS,
        )
    return results
