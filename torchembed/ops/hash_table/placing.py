"""Placing keys by scores that they bring, as from a file, in tables where no batch is under way."""

import torch
from torch import Tensor

from torchembed.core.hash_tables import Policy
from torchembed.ops.hash_table.function import find_slots, insert_keys
from torchembed.ops.hash_table.layout import HashTables


def place_keys(hash_tables: HashTables, keys: Tensor, tables: Tensor, scores: Tensor) -> Tensor:
    """The slots of ``keys [n]``, int64 ``[n]``, which get slots where they have none: -1 for those
    that found only greater scores in their buckets. Changes ``hash_tables`` in place, and waits for
    the device.

    Where a bucket is full the least score makes room, whenever it was used. Keys that the tables
    hold already get ``scores`` too; ``touched`` stays the caller's to set, but under LRU, whose
    scores it is.

    Args:
        hash_tables: of any policy.
        keys: int64 ``[n]``, each at most once a table.
        tables: int32 ``[n]``.
        scores: int64 ``[n]``; under LRU the epochs of the last use, from 1 on.
    """
    # By scores alone: as if no row had been used, and LRU's score were one of its own.
    unused = torch.zeros_like(hash_tables.touched)
    own_scores = hash_tables.touched if hash_tables.scores is None else hash_tables.scores
    by_score = hash_tables._replace(touched=unused, scores=own_scores)
    one = torch.ones(1, dtype=torch.int64, device=keys.device)
    has_changed = True
    while has_changed:
        # Keys of one call take no places from each other, so those that were refused try again.
        placed = insert_keys(
            by_score,
            keys,
            tables,
            find_slots(by_score, keys, tables),
            policy=Policy.CALLER,
            epoch=one,
            released=torch.zeros_like(one),
            scores=scores,
        )
        unused.zero_()
        is_new = placed.new_slots >= 0
        new_scores = own_scores[placed.new_slots.clamp_min(0)]
        is_better = ~placed.is_evicted | (new_scores > placed.evicted_scores)
        has_changed = bool((is_new & is_better).any())
    slots = find_slots(by_score, keys, tables)
    is_held = slots >= 0
    own_scores[slots[is_held]] = scores[is_held]
    return slots
