"""The public functions of caches of rows."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.row_caches import CacheCounter, RowCache
from torchembed.ops.row_cache.schema import (
    claim_slots_op,
    find_cached_op,
    move_rows_op,
    read_rows_op,
)


class RowMoves(NamedTuple):
    """Rows to write from slots of a cache to where they are stored, and to read from there. From
    ``count`` on, entries are -1."""

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

    Rows that are cached keep their slots. The others, in ascending order, take slots that are
    evictable: free ones, and those that no batch used in an epoch after ``released``, nor this
    batch uses. The hand chooses: it goes around the slots from where it stands and takes the
    evictable ones that are not recent; those that it passes are not recent any more. Where a whole
    round does not give enough slots, a second one from the same start takes evictable ones that
    were recent. The hand then stands behind the last slot taken. At the end every slot of the batch
    is recent and dirty, and ``epoch`` is its last use.

    A batch that needs more slots than are evictable is refused as a whole: nothing but the counters
    changes, and there are no moves.

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


def find_cached(slot_of_row: Tensor, rows: Tensor) -> Tensor:
    """The slot of each row, ``[L]`` of the dtype of ``rows``; -1 for row -1 and for rows that are
    not cached. Changes nothing, and never synchronizes.

    Args:
        slot_of_row: int32 ``[R]``, of a :class:`RowCache`.
        rows: ``[L]``, int32 or int64, each -1 or in ``[0, R)``; L < 2**31.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit.
    """
    return find_cached_op(slot_of_row, rows.contiguous())


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


def move_rows(moves: RowMoves, cached: Sequence[Tensor], stored: Sequence[Tensor]) -> None:
    """Write rows from their slots to where they are stored, and then read others into the slots.

    Move ``i < count`` does ``stored[j][written_rows[i]] = cached[j][slots[i]]`` for each ``j``, and
    then ``cached[j][slots[i]] = stored[j][read_rows[i]]``; a row of -1 is left out. Elements keep
    their bits. No row may be both written and read by one call. Deterministic; never synchronizes,
    so a host that reads what was written has to.

    Worked example: ``cached = [[[1., 2.], [3., 4.]]]``, ``stored = [[[5., 6.], [7., 8.]]]`` and one
    move: slot 1, written row 0, read row 1. Afterwards row 1 of ``cached[0]`` is ``7 8`` and row 0
    of ``stored[0]`` is ``3 4``.

    Args:
        moves: of :func:`claim_slots` or :func:`dirty_moves`.
        cached: tensors ``[C, ...]``, contiguous, such as a weight ``[C, D]`` and a state ``[C]``;
            changed.
        stored: for each of them ``[R, ...]`` of its dtype and its shape of rows, contiguous, on the
            same device or, for a GPU, in pinned memory of the host; changed.

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
        stored: ``[R, D]``, of the same dtype, on the same device or, for a GPU, in pinned memory of
            the host.
        slots: ``[L]``, int32 or int64, of :func:`find_cached`.
        rows: ``[L]``, int32 or int64, each -1 or in ``[0, R)``; L < 2**31.

    Returns:
        ``[L, D]``, of the dtype and on the device of ``cached``.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit.
    """
    return read_rows_op(cached.detach(), stored.detach(), slots.contiguous(), rows.contiguous())
