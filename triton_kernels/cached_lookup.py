"""The Triton kernel of ``cached_lookup``.

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

from torchembed.core.cached_lookups import (
    SCALE_BYTES,
    CachedLookup,
    LookupResults,
    empty_lookup,
)
from torchembed.core.hash_tables import BUCKET_SLOTS, Counter
from torchembed.triton_kernels.find_slots import slots_of_keys
from torchembed.triton_kernels.launch_sizes import cdiv, next_power_of_2
from torchembed.triton_kernels.rounding import as_float32
from torchembed.triton_kernels.table_counters import count_by_table

_HITS = tl.constexpr(int(Counter.HITS))
_MISSES = tl.constexpr(int(Counter.MISSES))
# Ids of a program: a bucket's digests of each are 16 bytes of each thread of 4 warps, and 2,000 ids
# fill an H100's 132 multiprocessors.
_BLOCK = 16
_MOST_COLUMNS = 128
_FIRST_OF_8_BITS = SCALE_BYTES
_ONE_PROGRAM = tl.constexpr(1 << 32)


@triton.jit
def float8_as_float32(code):
    """Float32 of each ``code``, the bits of a float8_e4m3fn as uint8; exact.

    Example: 0x38 is 1, 0xC4 is -3, 0x01 is 2**-9, 0x7F is NaN.
    """
    bits = code.to(tl.int32)
    exponent, fraction = (bits >> 3) & 15, bits & 7
    normal = (((exponent + 120) << 23) | (fraction << 20)).to(tl.float32, bitcast=True)
    size = tl.where(exponent == 0, fraction.to(tl.float32) * 0.001953125, normal)
    size = tl.where((bits & 127) == 127, float("nan"), size)
    return tl.where(bits >= 128, -size, size)


@triton.jit
def _load_line(
    elements_ptr,
    scales_ptr,
    line,
    inside,
    column,
    in_row,
    STRIDE: tl.constexpr,
    FIRST: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
):
    """Float32 ``[N, C]``: the columns of each ``line [N]`` that is ``inside``, zeros of others.

    Example: int8, ``STRIDE = 8``, ``FIRST = 4``, scale 0.5 and codes 2 4 0 0: ``1 2``.
    """
    offset = line[:, None] * STRIDE + FIRST + column[None, :]
    element = tl.load(elements_ptr + offset, mask=inside[:, None] & in_row[None, :], other=0)
    if scales_ptr is None:
        value = as_float32(element)
    else:
        value = float8_as_float32(element) if IS_FLOAT8 else element.to(tl.float32)
        scale = tl.load(scales_ptr + line * (STRIDE // 4), mask=inside, other=0.0)
        value *= scale[:, None]
    return value


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

    The last program to count its missing ids writes their sum, brings ``progress`` back to 0 and
    begins the next epoch, so that nothing need be set before a launch.

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
            value = _load_line(
                elements_ptr, scales_ptr, line, is_far, column, in_row, STRIDE, FIRST, IS_FLOAT8
            )
            if copy_of_line_ptr is not None:
                near = _load_line(
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

    if counters_ptr is not None:
        count_by_table(table, is_hit, counters_ptr, _HITS, 1)
        count_by_table(table, is_missing, counters_ptr, _MISSES, 1)
    if touched_ptr is not None:
        epoch = tl.load(epoch_ptr) + 1 + tl.zeros([BLOCK], tl.int64)
        # Most positions of a frequent slot see that another one was faster, and spare the atomic.
        seen = tl.load(touched_ptr + slot, mask=is_hit, other=0, cache_modifier=".cg")
        tl.atomic_max(touched_ptr + slot, epoch, mask=is_hit & (seen < epoch), sem="relaxed")
    num_missed = tl.sum(is_missing.to(tl.int64), axis=0)
    # All threads have read the epoch before one of them may say that this program is done.
    tl.debug_barrier()
    before = tl.atomic_add(progress_ptr, num_missed + _ONE_PROGRAM)
    if (before >> 32) == tl.num_programs(0) - 1:
        tl.store(num_missing_ptr, (before & 0xFFFFFFFF) + num_missed)
        tl.store(progress_ptr, 0)
        if epoch_ptr is not None:
            tl.atomic_add(epoch_ptr, 1, sem="relaxed")


def launch_cached_lookup(call: CachedLookup) -> LookupResults:
    """``torchembed::cached_lookup``; see :func:`torchembed.ops.cached_lookup.cached_lookup`."""
    results = empty_lookup(call.keys, call.dim, reads=call.reads)
    rows, slots, is_missing, num_missing = results
    num_ids, dtype = call.keys.numel(), call.line_dtype
    is_scaled, is_float8 = dtype.itemsize == 1, dtype == torch.float8_e4m3fn
    # The kernel takes the bits of what the interpreter has no type for.
    kept = torch.uint8 if is_float8 else dtype
    copies = call.copies
    with torch.cuda.device_of(call.keys):
        _cached_lookup_kernel[(max(1, cdiv(num_ids, _BLOCK)),)](
            call.keys,
            call.tables,
            call.digests,
            call.slot_keys,
            call.geometry,
            call.lines.view(kept),
            call.lines.view(torch.float32) if is_scaled else None,
            None if copies is None else copies.view(kept),
            copies.view(torch.float32) if copies is not None and is_scaled else None,
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
            STRIDE=call.lines.shape[1] // kept.itemsize,
            FIRST=_FIRST_OF_8_BITS if is_scaled else 0,
            IS_FLOAT8=is_float8,
            BUCKET=BUCKET_SLOTS,
            BLOCK=_BLOCK,
            BLOCK_D=min(next_power_of_2(call.dim), _MOST_COLUMNS),
        )
    return results
