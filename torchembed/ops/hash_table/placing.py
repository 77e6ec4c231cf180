"""Placing keys by scores that they bring, as from a file, in tables where no batch is under way."""

import torch
from torch import Tensor

from torchembed.core.hash_tables import Policy
from torchembed.ops.hash_table.function import find_slots, insert_keys
from torchembed.ops.hash_table.layout import HashTables

_MOST_PIECES = 64


def place_keys(hash_tables: HashTables, keys: Tensor, tables: Tensor, scores: Tensor) -> Tensor:
    """The slots of ``keys [n]``, int64 ``[n]``, which get slots where they have none: -1 for those
    that found only greater scores in their buckets. Changes ``hash_tables`` in place, and waits for
    the device.

    Where a bucket is full the least score makes room, whenever it was used. Keys are placed in
    pieces of descending scores, since a key takes no place from another one of its piece: of up to
    64 different scores the greatest get the places, and of more nearly so. Keys that the tables
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
    for piece in _by_score(scores):
        _place(by_score, keys[piece], tables[piece], scores[piece])
    slots = find_slots(by_score, keys, tables)
    is_held = slots >= 0
    own_scores[slots[is_held]] = scores[is_held]
    return slots


def _by_score(scores: Tensor) -> tuple[Tensor, ...]:
    """The positions of ``scores [n]`` in pieces of descending scores: one for each score, or, of
    more scores than pieces, for a range of them."""
    order = scores.argsort(descending=True, stable=True)
    in_order = scores[order]
    starts = (in_order[1:] != in_order[:-1]).nonzero().flatten() + 1
    if len(starts) >= _MOST_PIECES:
        starts = starts[torch.linspace(0, len(starts) - 1, _MOST_PIECES - 1).long()]
    return order.tensor_split(starts.cpu())


def _place(by_score: HashTables, keys: Tensor, tables: Tensor, scores: Tensor) -> None:
    """Give slots to ``keys [n]``, by their scores alone."""
    assert by_score.scores is not None
    one, has_changed = torch.ones(1, dtype=torch.int64, device=keys.device), True
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
        by_score.touched.zero_()
        is_new = placed.new_slots >= 0
        new_scores = by_score.scores[placed.new_slots.clamp_min(0)]
        is_better = ~placed.is_evicted | (new_scores > placed.evicted_scores)
        has_changed = bool((is_new & is_better).any())
