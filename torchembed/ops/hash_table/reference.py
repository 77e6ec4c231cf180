"""The specification of the operations on hash tables, to be read."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.hash_tables import (
    BUCKET_SLOTS,
    Counter,
    InsertionResults,
    KeyErasure,
    KeyInsertion,
    Policy,
    SlotTouch,
)
from torchembed.ops.hash_table.hashing import locate_keys

_UNSIGNED = (1 << 64) - 1
_MAX_COUNT = (1 << 32) - 1
_INT64_MIN = torch.iinfo(torch.int64).min


def find_slots_reference(
    keys: Tensor, tables: Tensor, digests: Tensor, slot_keys: Tensor, geometry: Tensor
) -> Tensor:
    if digests.numel() == 0:
        return torch.full_like(keys, -1)
    places = locate_keys(keys, tables, geometry)
    place = torch.arange(BUCKET_SLOTS, device=keys.device)
    inside = (place < places.num_slots[:, None])[:, None]  # [L, 1, BUCKET_SLOTS]
    candidates = torch.where(inside, places.buckets[:, :, None] + place, 0)
    found = (
        inside
        & (digests[candidates] == places.digests[:, None, None])
        & (slot_keys[candidates] == keys[:, None, None])
    )
    return torch.where(found, candidates, -1).amax((1, 2))


def _count(
    counters: Tensor, counter: Counter, tables: Tensor, counted: Tensor, sign: int = 1
) -> None:
    """Add, or subtract, the positions of each table that are ``counted``."""
    for table in range(counters.shape[0]):
        counters[table, counter] += sign * (counted & (tables == table)).sum()


def touch_slots_reference(touch: SlotTouch) -> None:
    is_id = touch.tables >= 0
    if touch.is_trained is not None:
        is_id = is_id & touch.is_trained
    is_hit = is_id & (touch.slots >= 0)
    _count(touch.counters, Counter.HITS, touch.tables, is_hit)
    _count(touch.counters, Counter.MISSES, touch.tables, is_id & ~is_hit)
    if touch.touched.numel() == 0:
        return
    # Positions that touch nothing change slot 0 by an operation that leaves it as it is.
    place = touch.slots.clamp_min(0)
    touch.touched.scatter_reduce_(0, place, torch.where(is_hit, touch.epoch, _INT64_MIN), "amax")
    if touch.policy == Policy.LRU:
        return
    scores = touch.scores
    assert scores is not None
    occurrences = torch.zeros_like(scores).scatter_add_(0, place, is_hit.long())
    if touch.policy == Policy.LFU:
        scores += occurrences
        return
    if touch.policy == Policy.EPOCH_LFU:
        assert touch.epoch_number is not None
        count = ((scores & _MAX_COUNT) + occurrences).clamp_max(_MAX_COUNT)
        new_scores = (touch.epoch_number << 32) | count
    else:
        assert touch.scores_in is not None
        given = torch.where(is_hit, touch.scores_in, _INT64_MIN)
        new_scores = torch.full_like(scores, _INT64_MIN).scatter_reduce_(0, place, given, "amax")
    scores.copy_(torch.where(occurrences > 0, new_scores, scores))


class _NewKey(NamedTuple):
    """A distinct key of a batch that is to be inserted."""

    table: int
    hash: int
    key: int
    digest: int
    buckets: list[int]
    """The first slots of its two buckets, or of the one that there is."""
    num_slots: int
    positions: list[int]
    """The places of the key in the batch, ascending."""


def _new_keys(keys: Tensor, tables: Tensor, is_new: Tensor, geometry: Tensor) -> list[_NewKey]:
    """The distinct keys at the positions ``is_new``, in the order in which they are inserted."""
    places = locate_keys(keys, tables, geometry)
    found: dict[tuple[int, int], _NewKey] = {}
    for position in is_new.nonzero().flatten().tolist():
        table = int(tables[position])
        hash_ = int(places.hashes[position]) & _UNSIGNED
        if (table, hash_) not in found:
            buckets = list(dict.fromkeys(places.buckets[position].tolist()))
            digest, num_slots = int(places.digests[position]), int(places.num_slots[position])
            key = int(keys[position])
            found[table, hash_] = _NewKey(table, hash_, key, digest, buckets, num_slots, [])
        found[table, hash_].positions.append(position)
    return [found[order] for order in sorted(found)]


def _first_score(
    new: _NewKey, policy: int, epoch: int, epoch_number: Tensor | None, scores_in: Tensor | None
) -> int:
    if policy == Policy.LRU:
        return epoch
    if policy == Policy.CALLER:
        assert scores_in is not None
        return int(scores_in[new.positions].max())
    if policy == Policy.LFU:
        return len(new.positions)
    assert epoch_number is not None
    return int(epoch_number) << 32 | min(len(new.positions), _MAX_COUNT)


def _free_slot(new: _NewKey, digests: Tensor) -> int | None:
    """The first free slot of the bucket that has more of them, the first bucket where both have as
    many."""
    free: list[list[int]] = []
    for first in new.buckets:
        in_bucket = enumerate(digests[first : first + new.num_slots].tolist(), start=first)
        free.append([slot for slot, digest in in_bucket if digest == 0])
    return min(max(free, key=len), default=None)


def _victim(new: _NewKey, score: int, released: int, touched: Tensor, scores: Tensor) -> int | None:
    """The slot of the least score, of the longest unused among equal ones; None where all rows are
    in use, or have scores above ``score``."""
    candidates = []
    for first in new.buckets:
        end = first + new.num_slots
        rows = zip(scores[first:end].tolist(), touched[first:end].tolist(), strict=True)
        for slot, (slot_score, last_use) in enumerate(rows, start=first):
            if last_use <= released:
                candidates.append((slot_score, last_use, new.buckets.index(first), slot))
    if not candidates or min(candidates)[0] > score:
        return None
    return min(candidates)[-1]


def insert_keys_reference(insertion: KeyInsertion) -> InsertionResults:
    keys, tables, scores = insertion.keys, insertion.tables, insertion.scores
    is_new = (tables >= 0) & (insertion.slots < 0)
    if insertion.wanted is not None:
        is_new &= insertion.wanted
    if insertion.is_trained is not None:
        is_new &= insertion.is_trained
    state = [
        insertion.digests,
        insertion.slot_keys,
        insertion.touched,
        insertion.touched if scores is None else scores,
        insertion.counters,
    ]
    host_state = [tensor.cpu() for tensor in state]  # the tensors themselves, on a CPU
    host_digests, host_keys, host_touched, host_scores, host_counters = host_state
    epoch_, released_ = int(insertion.epoch), int(insertion.released)

    result = insertion.slots.clone()
    num_ids = keys.numel()
    new_keys, new_slots = torch.zeros_like(keys), torch.full_like(keys, -1)
    new_tables = torch.full_like(tables, -1)
    is_evicted = torch.zeros(num_ids, dtype=torch.bool, device=keys.device)
    evicted_keys, evicted_scores, evicted_touched = (torch.zeros_like(keys) for _ in range(3))
    num_new = 0
    for new in _new_keys(keys, tables, is_new, insertion.geometry):
        count = host_counters[new.table]
        score = _first_score(
            new, insertion.policy, epoch_, insertion.epoch_number, insertion.scores_in
        )
        slot = _free_slot(new, host_digests)
        if slot is not None:
            count[Counter.SIZE] += 1
        else:
            slot = _victim(new, score, released_, host_touched, host_scores)
            if slot is None:
                count[Counter.REFUSED] += 1
                continue
            is_evicted[num_new] = True
            evicted_keys[num_new] = host_keys[slot]
            evicted_scores[num_new] = host_scores[slot]
            evicted_touched[num_new] = host_touched[slot]
            count[Counter.EVICTED_FULL] += 1
            count[Counter.EVICTED_AGE] += epoch_ - host_touched[slot]
        count[Counter.INSERTED] += 1
        host_digests[slot], host_keys[slot] = new.digest, new.key
        host_scores[slot] = score
        host_touched[slot] = epoch_
        new_keys[num_new], new_tables[num_new], new_slots[num_new] = new.key, new.table, slot
        result[new.positions] = slot
        num_new += 1
    for tensor, host in zip(state, host_state, strict=True):
        tensor.copy_(host)
    return (
        result,
        new_keys,
        new_tables,
        new_slots,
        torch.tensor([num_new], device=keys.device),
        is_evicted,
        evicted_keys,
        evicted_scores,
        evicted_touched,
    )


def erase_keys_reference(erasure: KeyErasure) -> Tensor:
    slots = find_slots_reference(
        erasure.keys, erasure.tables, erasure.digests, erasure.slot_keys, erasure.geometry
    )
    num_ids, num_slots = erasure.keys.numel(), erasure.digests.numel()
    if num_slots == 0:
        return slots
    place = slots.clamp_min(0)
    positions = torch.arange(num_ids, device=erasure.keys.device)
    # The first position of each slot's key stands for all of them.
    held = torch.where(slots >= 0, positions, num_ids)
    first = held.new_full((num_slots,), num_ids).scatter_reduce_(0, place, held, "amin")
    is_first = (slots >= 0) & (first[place] == positions)
    in_use = erasure.touched[place] > erasure.released
    _count(erasure.counters, Counter.IN_USE, erasure.tables, is_first & in_use)
    _count(erasure.counters, Counter.ERASED, erasure.tables, is_first & ~in_use)
    _count(erasure.counters, Counter.SIZE, erasure.tables, is_first & ~in_use, sign=-1)
    is_erased = (first < num_ids) & (erasure.touched <= erasure.released)
    for state in (erasure.digests, erasure.slot_keys, erasure.touched, erasure.scores):
        if state is not None:
            state.masked_fill_(is_erased, 0)
    return torch.where(in_use, -1, slots)
