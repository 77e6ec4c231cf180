"""The specification of the operations on caches of rows, to be read."""

import torch
from torch import Tensor

from torchembed.core.row_caches import (
    REGION_BITS,
    CacheCounter,
    ClaimResults,
    PlaceExchange,
    PlaceResults,
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

    cache.last_use[hits] = claim.epoch
    cache.is_recent[hits] = True
    cache.is_dirty[hits] = True

    # The evictable slots in the order in which the hand reaches them: those that are not recent in
    # its first round, the others in its second one.
    is_evictable = (cache.row_of_slot < 0) | (cache.last_use <= claim.released)
    one_round = (torch.arange(num_slots, device=wanted.device) + cache.hand) % num_slots
    of_first = one_round[(is_evictable & ~cache.is_recent)[one_round]]
    of_second = one_round[(is_evictable & cache.is_recent)[one_round]]
    num_evictable = of_first.numel() + of_second.numel()
    if missing.numel() > num_evictable:
        num_refused.fill_(missing.numel() - num_evictable)
        cache.counters[CacheCounter.REFUSED_BATCHES] += 1
        return results
    if missing.numel() == 0:
        return results

    victims = torch.cat((of_first, of_second))[: missing.numel()]
    num_passed = int((victims[-1] - cache.hand) % num_slots) + 1
    passed = one_round if victims.numel() > of_first.numel() else one_round[:num_passed]
    cache.is_recent[passed] &= cache.last_use[passed] == claim.epoch
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
    cache.last_use[victims] = claim.epoch
    cache.is_recent[victims] = True
    cache.is_dirty[victims] = True
    return results


def exchange_places_reference(exchange: PlaceExchange) -> PlaceResults:
    num_moves = int(exchange.count)
    slots, written, read = (rows[:num_moves] for rows in exchange[:3])
    places = exchange.place_of_row[read].long()
    order = (places >> REGION_BITS).argsort(stable=True)
    slots, written, read, places = slots[order], written[order], read[order], places[order]
    is_written = written >= 0
    left_places = exchange.place_of_row[written[is_written]]
    exchange.place_of_row[written[is_written]] = places[is_written].to(torch.int32)
    exchange.place_of_row[read[is_written]] = left_places
    results = (
        torch.empty_like(exchange.slots),
        torch.empty_like(exchange.written_rows),
        torch.empty_like(exchange.read_rows),
    )
    for result, of_moves in zip(
        results, (slots, places.where(is_written, -1), places), strict=True
    ):
        result[:num_moves] = of_moves
    return results


def find_cached_reference(
    slot_of_row: Tensor, rows: Tensor, num_rows: Tensor | None, no_slot: int
) -> Tensor:
    slots = torch.full_like(rows, no_slot)
    is_row = rows >= 0
    if num_rows is not None:
        is_row[int(num_rows) :] = False
    found = slot_of_row[rows[is_row].long()].to(rows.dtype)
    slots[is_row] = found.where(found >= 0, no_slot)
    return slots


def move_rows_reference(move: RowMove) -> None:
    num_moves = int(move.count)
    for cached, stored in zip(move.cached, move.stored, strict=True):
        slots, written, read = (
            rows[:num_moves].long() for rows in (move.slots, move.written_rows, move.read_rows)
        )
        is_written, is_read = written >= 0, read >= 0
        old = cached[slots[is_written]].to(stored.device)
        new = stored[read[is_read].to(stored.device)].to(cached.device)
        stored[written[is_written].to(stored.device)] = old
        cached[slots[is_read]] = new


def read_rows_reference(cached: Tensor, stored: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    out = cached.new_zeros(rows.numel(), cached.shape[1])
    is_cached = slots >= 0
    is_stored = ~is_cached & (rows >= 0)
    out[is_cached] = cached[slots[is_cached].long()]
    out[is_stored] = stored[rows[is_stored].long().to(stored.device)].to(out.device)
    return out
