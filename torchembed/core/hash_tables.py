"""Numbers of hash tables that their kernels and those who call them share."""

import enum

BUCKET_SLOTS = 128
"""The most slots of a bucket."""


class Policy(enum.IntEnum):
    """Meaning of the scores by which a full table chooses what to evict, the least first; kernels
    get the values."""

    LRU = 0
    """The epoch that used the row last, so that there are no scores beside ``touched``."""
    LFU = 1
    """How often the key occurred since it was inserted, duplicates in a batch counted."""
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
