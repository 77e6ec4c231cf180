"""The Triton kernels of ``exchange_places``.

The first one finds the regions of the places that are read, a sort orders them, and the last one
exchanges places of rows, in that order.

Byte floor for each move: its row, 8 bytes, and a sector of 32 bytes of its place read, and 4 bytes
of its region written; then 20 bytes of it read and written, and a sector of each of both rows'
places. A pass of the sort moves 20 bytes of each, mostly within the second-level cache; one is
enough for 33 million rows.
"""

import torch
import triton
import triton.language as tl

from torchembed.core.row_caches import REGION_BITS, PlaceExchange, PlaceResults
from torchembed.triton_kernels.launch_sizes import cdiv
from torchembed.triton_kernels.sort_rows import library_sort_on, order_of_keys

_BLOCK = 512
# Programs that go through all moves together: most batches miss a few of the rows that they could.
_MOST_PROGRAMS = 264


@triton.jit(do_not_specialize=["num_regions", "num_moves"])
def _exchange_places_regions_kernel(
    read_rows_ptr,
    count_ptr,
    place_of_row_ptr,
    regions_ptr,
    num_regions,
    num_moves,
    REGION_BITS: tl.constexpr,
    FILLS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``regions[i]``: the region of the place of the row that move i reads; where ``FILLS``,
    ``num_regions`` behind the last move.

    Example: regions of one bit, ``place_of_row = [0, 2, 1]``, read rows 1 2 and then none: 1 0 2.
    """
    count = tl.load(count_ptr)
    end = tl.maximum(count, num_moves) if FILLS else count
    first = tl.program_id(0).to(tl.int64) * BLOCK
    while first < end:
        move = first + tl.arange(0, BLOCK)
        is_move = move < count
        row = tl.load(read_rows_ptr + move, mask=is_move, other=0)
        place = tl.load(place_of_row_ptr + row, mask=is_move, other=0)
        region = tl.where(is_move, place >> REGION_BITS, num_regions)
        tl.store(regions_ptr + move, region, mask=move < end)
        first += tl.num_programs(0) * BLOCK


@triton.jit
def _exchange_places_kernel(
    slots_ptr,
    written_rows_ptr,
    read_rows_ptr,
    count_ptr,
    place_of_row_ptr,
    order_ptr,
    out_slots_ptr,
    written_places_ptr,
    read_places_ptr,
    BLOCK: tl.constexpr,
):
    """The moves in the order of the sort, by places; where a row is written, it and the row that is
    read exchange theirs.

    Example: ``place_of_row = [0, 2, 1]``, moves (slot 5, written row 0, read row 1) and (3, -1, 2),
    order 1 0: slots 3 5, written places -1 2, read places 1 2, and ``place_of_row = [2, 0, 1]``.
    """
    count = tl.load(count_ptr)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    while first < count:
        entry = first + tl.arange(0, BLOCK)
        inside = entry < count
        move = tl.load(order_ptr + entry, mask=inside, other=0)
        written_row = tl.load(written_rows_ptr + move, mask=inside, other=-1)
        read_row = tl.load(read_rows_ptr + move, mask=inside, other=0)
        is_written = written_row >= 0
        # No other move has these rows.
        place = tl.load(place_of_row_ptr + read_row, mask=inside, other=0)
        left_place = tl.load(place_of_row_ptr + written_row, mask=is_written, other=0)
        tl.store(place_of_row_ptr + written_row, place, mask=is_written)
        tl.store(place_of_row_ptr + read_row, left_place, mask=is_written)
        slot = tl.load(slots_ptr + move, mask=inside, other=0)
        tl.store(out_slots_ptr + entry, slot, mask=inside)
        written_place = tl.where(is_written, place, -1).to(tl.int64)
        tl.store(written_places_ptr + entry, written_place, mask=inside)
        tl.store(read_places_ptr + entry, place.to(tl.int64), mask=inside)
        first += tl.num_programs(0) * BLOCK


def launch_exchange_places(exchange: PlaceExchange) -> PlaceResults:
    """``torchembed::exchange_places``; see
    :func:`torchembed.ops.row_cache.exchange_places`."""
    slots, written_rows, read_rows, count, place_of_row = exchange
    results = torch.empty_like(slots), torch.empty_like(written_rows), torch.empty_like(read_rows)
    num_moves = slots.numel()
    if num_moves == 0:
        return results
    num_regions = cdiv(place_of_row.numel(), 1 << REGION_BITS)
    grid = (min(cdiv(num_moves, _BLOCK), _MOST_PROGRAMS),)
    with torch.cuda.device_of(slots):
        regions = torch.empty_like(slots)
        _exchange_places_regions_kernel[grid](
            read_rows,
            count,
            place_of_row,
            regions,
            num_regions,
            num_moves,
            REGION_BITS=REGION_BITS,
            FILLS=library_sort_on(slots.device) is None,
            BLOCK=_BLOCK,
        )
        order = order_of_keys(regions, num_regions, count)
        _exchange_places_kernel[grid](*exchange, order, *results, BLOCK=_BLOCK)
    return results
