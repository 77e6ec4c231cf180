"""The public functions of caches of rows."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.row_caches import CacheCounter, RowCache
from torchembed.ops.row_cache.schema import (
    claim_slots_op,
    exchange_places_op,
    find_cached_op,
    move_rows_op,
    read_rows_op,
)


class RowMoves(NamedTuple):
    """Rows to write from slots of a cache to where they are stored, and to read from there. Entries
    from ``count`` on are no moves."""

    slots: Tensor
    """int32 ``[K]``: the slot of each move, each slot once."""
    written_rows: Tensor
    """int64 ``[K]``: the row that the slot holds and that is to be written first, -1 for none."""
    read_rows: Tensor
    """int64 ``[K]``: the row that is to be read into the slot, -1 for none."""
    count: Tensor
    """int64 ``[1]``: the number of moves."""


class ClaimedSlots(NamedTuple):
    """Result of :func:`claim_slots`."""

    moves: RowMoves
    """For the rows that were not cached, in ascending order; ``K = min(L, C)``."""
    num_refused: Tensor
    """int64 ``[1]``: by how many slots the batch needs more than are evictable; 0 where it fits."""


def claim_slots(
    cache: RowCache,
    unique_rows: Tensor,
    num_unique: Tensor,
    *,
    epoch: Tensor,
    released: Tensor,
    is_trained: Tensor | None = None,
) -> ClaimedSlots:
    """Give every row of a batch that will be trained a slot of ``cache``, and say which rows must
    be moved for that, which :func:`move_rows` does; :func:`find_cached` then finds the slots.

    Rows that are cached keep their slots, whose last use is ``epoch`` from then on, and which are
    recent and dirty. The others, in ascending order, take slots that are evictable: free ones, and
    those that no batch used in an epoch after ``released``. The hand chooses: it goes around the
    slots from where it stands and takes the evictable ones that are not recent; those that it
    passes are not recent any more, but for the batch's own. Where a whole round does not give
    enough slots, a second one from the same start takes evictable ones that were recent. The hand
    then stands behind the last slot taken. What it took is the batch's own, too.

    A batch that needs more slots than are evictable is refused: its rows that are cached are used
    as above, but no other gets a slot, there are no moves, and the hand passes nothing.

    Two calls with equal arguments leave equal caches, bit for bit. Never synchronizes.

    Worked example: a cache of two slots; slot 0 holds row 5, dirty and recent, slot 1 is free, and
    the hand stands at 0. Rows 5 and 9 give one move: slot 1, written row -1, read row 9; the hand
    is at 0 again. After that is released, row 7 finds both slots recent: the second round takes
    slot 0, where row 5 is written first and row 7 is read.

    Args:
        cache: changed.
        unique_rows: ``[L]``, int32 or int64: the batch's rows, in ``[0, R)`` and increasing, as
            :func:`torchembed.ops.segments.find_runs` gives them; L < 2**31.
        num_unique: int32 ``[1]``: how many of them there are.
        epoch: int64 ``[1]``: the batch's number, greater than those of all batches before.
        released: int64 ``[1]``, less than ``epoch``: all batches up to this epoch were trained.
        is_trained: bool ``[1]``: False where nothing may change, not even the counters; there are
            no moves then. None: True.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit.
    """
    *moves, num_refused = claim_slots_op(
        unique_rows.contiguous(), num_unique, epoch, released, is_trained, *cache
    )
    return ClaimedSlots(RowMoves(*moves), num_refused)


def find_cached(
    slot_of_row: Tensor, rows: Tensor, *, num_rows: Tensor | None = None, no_slot: int = -1
) -> Tensor:
    """The slot of each row, ``[L]`` of the dtype of ``rows``; ``no_slot`` for row -1 and for rows
    that are not cached. Changes nothing, and never synchronizes.

    Args:
        slot_of_row: int32 ``[R]``, of a :class:`RowCache`.
        rows: ``[L]``, int32 or int64, each -1 or in ``[0, R)``; L < 2**31.
        num_rows: int32 ``[1]``: how many of them are looked at; those behind are as row -1,
            whatever they are, and take less time. None: all.
        no_slot: fits the dtype of ``rows``.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit.
    """
    return find_cached_op(slot_of_row, rows.contiguous(), num_rows, no_slot)


def dirty_moves(cache: RowCache) -> RowMoves:
    """The moves, ``K = C``, that write the rows of all dirty slots, in ascending order of slots;
    the slots are clean from then on. Never synchronizes.

    Do the moves before any slot changes or is claimed. Batches whose slots were claimed must be
    trained by then, since what they change after it would not be written.

    Args:
        cache: its flags of dirty slots and its counter of written rows are changed.
    """
    num_slots = cache.is_dirty.numel()
    # Slots that are clean write to entry C, which is cut off: shapes stay static.
    entry = torch.where(cache.is_dirty, cache.is_dirty.cumsum(0) - 1, num_slots)

    def of_dirty(values: Tensor) -> Tensor:
        return values.new_full((num_slots + 1,), -1).scatter_(0, entry, values)[:num_slots]

    numbers = torch.arange(num_slots, dtype=torch.int32, device=entry.device)
    written_rows = of_dirty(cache.row_of_slot)
    count = cache.is_dirty.sum(0, keepdim=True)
    moves = RowMoves(of_dirty(numbers), written_rows, torch.full_like(written_rows, -1), count)
    cache.counters[CacheCounter.WRITTEN_ROWS : CacheCounter.WRITTEN_ROWS + 1] += count
    cache.is_dirty.zero_()
    return moves


def exchange_places(place_of_row: Tensor, moves: RowMoves) -> RowMoves:
    """Say at which places the rows of ``moves`` are stored, where each row that is written goes to
    the place of the row that is read into its slot, and gives its own place up to that one.

    Whoever moves them touches one place for both. Deterministic; never synchronizes.

    Worked example: rows 0, 1 and 2 have the places 0, 2 and 1. Two moves, of slot 5, where row 0 is
    written and row 1 read, and of slot 3, where row 2 is read, become moves of slot 5, which writes
    place 2 and reads it, and of slot 3, which reads place 1. Rows 0, 1 and 2 then have the places
    2, 0 and 1.

    Args:
        place_of_row: int32 ``[R]``, the place of each row, all different; changed.
        moves: of :func:`claim_slots`.

    Returns:
        The moves with places for rows, in ascending order of the regions of 2**16 places that are
        read, and of one region in the order of ``moves``. From ``count`` on they are undefined.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit.
    """
    slots, written_places, read_places = exchange_places_op(*moves, place_of_row)
    return RowMoves(slots, written_places, read_places, moves.count)


def move_rows(moves: RowMoves, cached: Sequence[Tensor], stored: Sequence[Tensor]) -> None:
    """Write rows from their slots to where they are stored, and read others into the slots.

    Move ``i < count`` does ``stored[j][written_rows[i]] = cached[j][slots[i]]`` for each ``j``, and
    ``cached[j][slots[i]] = stored[j][read_rows[i]]``; a row of -1 is left out. Both are read before
    either is written: where the rows of a move are equal, slot and row exchange what they hold.
    Elements keep their bits. No row may be written by one move and read by another one.
    Deterministic; never synchronizes, so a host that reads what was written has to.

    Worked example: ``cached = [[[1., 2.], [3., 4.]]]``, ``stored = [[[5., 6.], [7., 8.]]]`` and one
    move: slot 1, written row 0, read row 1. Afterwards row 1 of ``cached[0]`` is ``7 8`` and row 0
    of ``stored[0]`` is ``3 4``.

    Args:
        moves: of :func:`claim_slots` or :func:`dirty_moves`.
        cached: tensors ``[C, ...]``, contiguous, such as a weight ``[C, D]`` and a state ``[C]``;
            changed.
        stored: for each of them ``[R, ...]`` of its dtype and its shape of rows, which are
            contiguous, with gaps between them or without, on the same device or, for a GPU, in
            pinned memory of the host; changed.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit.
    """
    move_rows_op(*moves, list(cached), list(stored))


def read_rows(cached: Tensor, stored: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    """Read rows from their slots, and those that have none from where they are stored, so that
    nothing need be cached: ``out[p]`` is ``cached[slots[p]]`` where that slot is not -1, else
    ``stored[rows[p]]``, and zeros for a row of -1.

    Elements keep their bits. Deterministic; never synchronizes; without a gradient.

    Args:
        cached: ``[C, D]``, float32, float16 or bfloat16.
        stored: ``[R, D]``, of the same dtype, of contiguous rows with gaps between them or without,
            on the same device or, for a GPU, in pinned memory of the host.
        slots: ``[L]``, int32 or int64, of :func:`find_cached`.
        rows: ``[L]``, int32 or int64, each -1 or in ``[0, R)``; L < 2**31.

    Returns:
        ``[L, D]``, of the dtype and on the device of ``cached``.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit.
    """
    return read_rows_op(cached.detach(), stored.detach(), slots.contiguous(), rows.contiguous())
