"""The specification of the operations on caches of rows, to be read."""

import torch
from torch import Tensor

from torchembed.core.row_caches import (
    CacheCounter,
    ClaimResults,
    RowMove,
    SlotClaim,
    empty_claim,
)


def claim_slots_reference(claim: SlotClaim) -> ClaimResults:
    cache = claim.cache
    num_slots = cache.row_of_slot.numel()
    results = empty_claim(claim.unique_rows, num_slots)
    moved_slots, written_rows, read_rows, count, num_refused = results
    for moves in (moved_slots, written_rows, read_rows):
        moves.fill_(-1)
    count.zero_()
    num_refused.zero_()
    if claim.is_trained is not None and not bool(claim.is_trained):
        return results

    wanted = claim.unique_rows[: int(claim.num_unique)].long()
    slots_of_wanted = cache.slot_of_row[wanted]
    missing = wanted[slots_of_wanted < 0]
    hits = slots_of_wanted[slots_of_wanted >= 0].long()
    cache.counters[CacheCounter.UNIQUE_ROWS] += wanted.numel()
    cache.counters[CacheCounter.UNIQUE_MISSES] += missing.numel()

    # The evictable slots in the order in which the hand reaches them: those that are not recent in
    # its first round, the others in its second one.
    is_evictable = (cache.row_of_slot < 0) | (cache.last_use <= claim.released)
    is_evictable[hits] = False
    one_round = (torch.arange(num_slots, device=wanted.device) + cache.hand) % num_slots
    of_first = one_round[(is_evictable & ~cache.is_recent)[one_round]]
    of_second = one_round[(is_evictable & cache.is_recent)[one_round]]
    num_evictable = of_first.numel() + of_second.numel()
    if missing.numel() > num_evictable:
        num_refused.fill_(missing.numel() - num_evictable)
        cache.counters[CacheCounter.REFUSED_BATCHES] += 1
        return results

    victims = torch.cat((of_first, of_second))[: missing.numel()]
    if victims.numel() > of_first.numel():
        cache.is_recent.fill_(False)
    elif victims.numel() > 0:
        num_passed = int((victims[-1] - cache.hand) % num_slots) + 1
        cache.is_recent[one_round[:num_passed]] = False
    if victims.numel() > 0:
        cache.hand.copy_((victims[-1] + 1) % num_slots)

    old_rows = cache.row_of_slot[victims]
    moved_slots[: victims.numel()] = victims.to(torch.int32)
    written_rows[: victims.numel()] = old_rows.where(cache.is_dirty[victims], -1)
    read_rows[: victims.numel()] = missing
    count.fill_(victims.numel())
    cache.counters[CacheCounter.WRITTEN_ROWS] += (written_rows >= 0).sum()
    cache.counters[CacheCounter.READ_ROWS] += victims.numel()
    cache.slot_of_row[old_rows[old_rows >= 0]] = -1
    cache.slot_of_row[missing] = victims.to(torch.int32)
    cache.row_of_slot[victims] = missing
    # Only now, so that all of the batch's slots are recent, however far the hand went.
    used = torch.cat((hits, victims))
    cache.last_use[used] = claim.epoch
    cache.is_recent[used] = True
    cache.is_dirty[used] = True
    return results


def find_cached_reference(slot_of_row: Tensor, rows: Tensor) -> Tensor:
    slots = torch.full_like(rows, -1)
    is_row = rows >= 0
    slots[is_row] = slot_of_row[rows[is_row].long()].to(rows.dtype)
    return slots


def move_rows_reference(move: RowMove) -> None:
    num_moves = int(move.count)
    for cached, stored in zip(move.cached, move.stored, strict=True):
        slots, written, read = (
            rows[:num_moves].long() for rows in (move.slots, move.written_rows, move.read_rows)
        )
        is_written, is_read = written >= 0, read >= 0
        lines = cached[slots[is_written]].to(stored.device)
        stored[written[is_written].to(stored.device)] = lines
        lines = stored[read[is_read].to(stored.device)].to(cached.device)
        cached[slots[is_read]] = lines


def read_rows_reference(cached: Tensor, stored: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    out = cached.new_zeros(rows.numel(), cached.shape[1])
    is_cached = slots >= 0
    is_stored = ~is_cached & (rows >= 0)
    out[is_cached] = cached[slots[is_cached].long()]
    out[is_stored] = stored[rows[is_stored].long().to(stored.device)].to(out.device)
    return out
