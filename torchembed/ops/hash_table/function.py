"""The public functions that find, touch, insert and erase keys of hash tables."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core import checks
from torchembed.core.hash_tables import Policy
from torchembed.ops.hash_table.layout import HashTables
from torchembed.ops.hash_table.schema import (
    erase_keys_op,
    find_slots_op,
    insert_keys_op,
    touch_slots_op,
)


def int64_keys(keys: Tensor) -> Tensor:
    """``keys`` as int64: int32 and uint32 keep their values, uint64 its bits.

    Raises:
        TypeError: for another dtype.
    """
    return checks.signed_ids("keys", keys).long()


def find_slots(hash_tables: HashTables, keys: Tensor, tables: Tensor) -> Tensor:
    """The slot of each key, int64 ``[L]``; -1 where its table has none for it.

    Changes nothing, and never synchronizes.

    Args:
        keys: ``[L]``, int64, int32, uint32 or uint64 (by its bits). Every number is a key.
        tables: int32 ``[L]``: the table of each key, -1 where there is no key.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit.
    """
    return find_slots_op(
        int64_keys(keys).contiguous(),
        tables.contiguous(),
        hash_tables.digests,
        hash_tables.keys,
        hash_tables.geometry,
    )


def touch_slots(
    hash_tables: HashTables,
    slots: Tensor,
    tables: Tensor,
    *,
    policy: Policy,
    epoch: Tensor,
    epoch_number: Tensor | None = None,
    scores: Tensor | None = None,
    is_trained: Tensor | None = None,
) -> None:
    """Note that a batch uses ``slots``: sets ``touched`` to ``epoch`` and changes scores.

    Each position counts: a key that stands in the batch n times occurs n times. Counts HITS and
    MISSES. Deterministic; never synchronizes.

    Args:
        hash_tables: changed.
        slots: int64 ``[L]``, of :func:`find_slots`: -1 where a key has none.
        tables: int32 ``[L]``: the table of each position, -1 where there is no key.
        policy: of the tables' scores.
        epoch: int64 ``[1]``: the batch's admission epoch, from 1 on.
        epoch_number: int64 ``[1]`` in ``[0, 2**31)``, for EPOCH_LFU alone: the current epoch of
            its scores.
        scores: int64 ``[L]``, for CALLER alone: the new scores of the keys.
        is_trained: bool ``[1]``: False where nothing may change; None: True.

    Raises:
        TypeError, ValueError: for a dtype, shape, device or policy that does not fit.
    """
    touch_slots_op(
        slots.contiguous(),
        tables.contiguous(),
        int(policy),
        epoch,
        epoch_number,
        None if scores is None else scores.contiguous(),
        is_trained,
        hash_tables.touched,
        hash_tables.scores,
        hash_tables.counters,
    )


class InsertedKeys(NamedTuple):
    """Result of :func:`insert_keys`. Entries of ``keys`` and what follows are the keys inserted, by
    (table, hash); from ``num_new`` on they are 0, ``tables`` and ``new_slots`` -1."""

    slots: Tensor
    """int64 ``[L]``: the slot of each position, -1 where its key has none."""
    keys: Tensor
    """int64 ``[L]``."""
    tables: Tensor
    """int32 ``[L]``."""
    new_slots: Tensor
    """int64 ``[L]``."""
    num_new: Tensor
    """int64 ``[1]``."""
    is_evicted: Tensor
    """bool ``[L]``: True where the slot was another key's."""
    evicted_keys: Tensor
    """int64 ``[L]``: that key, of the same table."""
    evicted_scores: Tensor
    """int64 ``[L]``: its score, under LRU the epoch of its last use."""
    evicted_touched: Tensor
    """int64 ``[L]``: the epoch of its last use."""


def insert_keys(
    hash_tables: HashTables,
    keys: Tensor,
    tables: Tensor,
    slots: Tensor,
    *,
    policy: Policy,
    epoch: Tensor,
    released: Tensor,
    epoch_number: Tensor | None = None,
    scores: Tensor | None = None,
    wanted: Tensor | None = None,
    is_trained: Tensor | None = None,
) -> InsertedKeys:
    """Insert the distinct keys that have no slot, and evict others where both buckets are full.

    Keys are inserted one after the other, by (table, hash as an unsigned number). A key takes the
    first free slot of that of its two buckets that has more of them, of the first one where both
    have as many. Where there is none, it takes the slot of the least score in both, of the longest
    unused of equal scores, and then of the first in order, unless that score exceeds its own. Rows
    touched in an epoch after ``released`` are never evicted. A key that finds no slot is refused:
    it is counted, and its positions stay at -1.

    Two calls with equal arguments leave equal tables, bit for bit. Never synchronizes.

    Worked example: keys ``[7, 5, 7, 9]`` of one table of two slots, one of which holds 5 since
    epoch 1, and slots ``[-1, 0, -1, -1]``, inserted in epoch 2 with ``released = 0``, by LRU. The
    hash of 7 is the least. 7 takes slot 1. 9 finds two rows in use and is refused: the result has
    slots ``[1, 0, 1, -1]`` and one new key. With ``released = 1``, 9 evicts 5, unless 5 was
    touched in epoch 2.

    Args:
        hash_tables: changed.
        keys, tables: as :func:`find_slots` took them.
        slots: int64 ``[L]``, as it gave them, and no key was inserted or erased since.
        policy: of the tables' scores. The score of a new key is ``epoch`` under LRU, its
            occurrences under LFU, ``epoch_number << 32 | occurrences`` under EPOCH_LFU, and the
            greatest of its ``scores`` under CALLER.
        epoch: int64 ``[1]``: the batch's admission epoch, from 1 on.
        released: int64 ``[1]``, less than ``epoch``: all batches up to this epoch were trained.
        epoch_number, scores, is_trained: as in :func:`touch_slots`.
        wanted: bool ``[L]``: False for positions to leave as they are; None: all are inserted.
            Equal for all positions of a key.

    Raises:
        TypeError, ValueError: for a dtype, shape, device or policy that does not fit.
    """
    return InsertedKeys(
        *insert_keys_op(
            int64_keys(keys).contiguous(),
            tables.contiguous(),
            slots.contiguous(),
            None if wanted is None else wanted.contiguous(),
            int(policy),
            epoch,
            epoch_number,
            released,
            None if scores is None else scores.contiguous(),
            is_trained,
            hash_tables.digests,
            hash_tables.keys,
            hash_tables.touched,
            hash_tables.scores,
            hash_tables.geometry,
            hash_tables.counters,
        )
    )


def erase_keys(
    hash_tables: HashTables, keys: Tensor, tables: Tensor, *, released: Tensor
) -> Tensor:
    """Erase keys; their slots are free afterwards. Returns the slot that each key had, int64
    ``[L]``: -1 where its table does not hold it, or where its row is in use.

    Keys whose rows were touched in an epoch after ``released`` stay, and are counted as IN_USE.
    Deterministic; never synchronizes.

    Args:
        hash_tables: changed.
        keys, tables: as :func:`find_slots` takes them. A key may occur several times.
        released: int64 ``[1]``: all batches up to this epoch were trained.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit.
    """
    return erase_keys_op(
        int64_keys(keys).contiguous(),
        tables.contiguous(),
        released,
        hash_tables.digests,
        hash_tables.keys,
        hash_tables.touched,
        hash_tables.scores,
        hash_tables.geometry,
        hash_tables.counters,
    )


def assign_scores(hash_tables: HashTables, keys: Tensor, tables: Tensor, scores: Tensor) -> Tensor:
    """Replace the scores of keys, and return their slots, int64 ``[L]``; -1 where a table does not
    hold a key. Of several scores of a key the greatest holds. Never synchronizes.

    Args:
        hash_tables: changed, and not under LRU, which has no scores.
        keys, tables: as :func:`find_slots` takes them.
        scores: int64 ``[L]``.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit, or tables without
            scores.
    """
    if hash_tables.scores is None:
        raise ValueError("hash_tables must have scores, got LRU's, whose score is the last use")
    checks.check_dtype("scores", scores, (torch.int64,), "call .long()")
    checks.check_numel("scores", scores, keys.numel(), "as keys has")
    slots = find_slots(hash_tables, keys, tables)
    if hash_tables.scores.numel() == 0:
        return slots
    place, is_held = slots.clamp_min(0), slots >= 0
    ends = torch.iinfo(torch.int64)
    # Positions without a slot change slot 0 by an operation that leaves it as it is.
    erasing = torch.where(is_held, ends.min, ends.max)
    hash_tables.scores.scatter_reduce_(0, place, erasing, "amin")
    given = torch.where(is_held, scores, ends.min)
    hash_tables.scores.scatter_reduce_(0, place, given, "amax")
    return slots
