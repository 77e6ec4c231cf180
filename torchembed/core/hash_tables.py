"""Numbers of hash tables that their kernels and those who call them share."""

import enum
from typing import NamedTuple

import torch
from torch import Tensor

BUCKET_SLOTS = 128
"""The most slots of a bucket."""


class Policy(enum.IntEnum):
    """Meaning of the scores by which a full table chooses what to evict, the least first; kernels
    get the values."""

    LRU = 0
    """The epoch that used the row last, so that there are no scores beside ``touched``."""
    LFU = 1
    """The occurrences of the key since it was inserted, duplicates in a batch counted."""
    EPOCH_LFU = 2
    """``epoch_number << 32 | count``: by the epoch (the caller's, a day say) of the last use, then
    by the occurrences since insertion, at most 2**32 - 1."""
    CALLER = 3
    """The caller's number of the key's last use; the greatest where a batch gave several."""


class Counter(enum.IntEnum):
    """Columns of ``HashTables.counters``. At any time INSERTED - (EVICTED_FULL + EVICTED_EXPIRED +
    EVICTED_TARGET) - ERASED = SIZE."""

    SIZE = 0
    """Keys that the table holds."""
    HITS = 1
    """Ids of trained batches that had a row, duplicates counted."""
    MISSES = 2
    """Ids of trained batches that had none, duplicates counted."""
    INSERTED = 3
    REFUSED = 4
    """Keys that were to be inserted, and found both their buckets full of rows in use or of
    greater scores; counted once a batch."""
    EVICTED_FULL = 5
    """Keys that others took the place of."""
    EVICTED_EXPIRED = 6
    """Keys that went because of their age."""
    EVICTED_TARGET = 7
    """Keys that went so that the table shrinks to a target."""
    ERASED = 8
    """Keys that the caller named or chose."""
    IN_USE = 9
    """Keys that were to be erased, and stayed since their rows were in use."""
    EVICTED_AGE = 10
    """Sum, over the keys that were evicted for any reason, of the epochs since their last use."""


class SlotTouch(NamedTuple):
    """Arguments of ``torchembed::touch_slots``, as every kernel takes them, in the order of the
    schema; :func:`torchembed.ops.hash_table.touch_slots` says what they mean."""

    slots: Tensor
    tables: Tensor
    policy: int
    """Value of a :class:`Policy`."""
    epoch: Tensor
    epoch_number: Tensor | None
    scores_in: Tensor | None
    """The caller's scores."""
    is_trained: Tensor | None
    touched: Tensor
    scores: Tensor | None
    counters: Tensor
    """These three are the tables', and are changed."""


class KeyInsertion(NamedTuple):
    """Arguments of ``torchembed::insert_keys``, likewise;
    see :func:`torchembed.ops.hash_table.insert_keys`."""

    keys: Tensor
    tables: Tensor
    slots: Tensor
    wanted: Tensor | None
    policy: int
    """Value of a :class:`Policy`."""
    epoch: Tensor
    epoch_number: Tensor | None
    released: Tensor
    scores_in: Tensor | None
    """The caller's scores."""
    is_trained: Tensor | None
    digests: Tensor
    slot_keys: Tensor
    touched: Tensor
    scores: Tensor | None
    """These four are the tables', and are changed."""
    geometry: Tensor
    counters: Tensor
    """Changed."""


InsertionResults = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Results of ``torchembed::insert_keys``, in the order of
:class:`torchembed.ops.hash_table.InsertedKeys`."""


def empty_results(keys: Tensor) -> InsertionResults:
    """Memory of the results for ``keys [L]``, not filled, but for the number of new keys, 0."""

    def like_keys(dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty_like(keys, dtype=dtype)

    return (
        like_keys(),
        like_keys(),
        like_keys(torch.int32),
        like_keys(),
        keys.new_zeros(1),
        like_keys(torch.bool),
        like_keys(),
        like_keys(),
        like_keys(),
    )


class KeyErasure(NamedTuple):
    """Arguments of ``torchembed::erase_keys``, likewise;
    see :func:`torchembed.ops.hash_table.erase_keys`."""

    keys: Tensor
    tables: Tensor
    released: Tensor
    digests: Tensor
    slot_keys: Tensor
    touched: Tensor
    scores: Tensor | None
    """These four are the tables', and are changed."""
    geometry: Tensor
    counters: Tensor
    """Changed."""
