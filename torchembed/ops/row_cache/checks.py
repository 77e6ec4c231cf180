"""Requirements of the operations on caches of rows on their arguments."""

import torch
from torch import Tensor

from torchembed.core import checks, contents
from torchembed.core.row_caches import CacheCounter, PlaceExchange, RowMove, SlotClaim
from torchembed.ops.row_cache.layout import MAX_SLOTS

_MAX_IDS = 2**31
_OF_CACHE = "make the cache by empty_row_cache"
_OF_RUNS = "take them from find_runs"
_OF_MOVES = "take the moves from claim_slots"


def _check_vector(
    name: str,
    tensor: Tensor,
    dtype: torch.dtype,
    advice: str,
    numel: int,
    meaning: str,
    like_name: str,
    like: Tensor,
) -> None:
    checks.check_dtype(name, tensor, (dtype,), advice)
    checks.check_memory(name, tensor, (numel,), meaning, like_name, like)


def _check_slot_of_row(slot_of_row: Tensor, like_name: str, like: Tensor) -> None:
    num_rows = slot_of_row.numel()
    _check_vector(
        *("slot_of_row", slot_of_row, torch.int32, _OF_CACHE),
        *(num_rows, "one for each row", like_name, like),
    )


def _check_rows(name: str, rows: Tensor) -> None:
    checks.check_ids(name, rows)
    checks.check_contiguous(name, rows)
    if checks.reaches(rows.numel(), _MAX_IDS):
        raise ValueError(
            f"{name} must hold fewer than 2**31 ids, got {rows.numel()}; split the batch"
        )


def check_claim_slots(claim: SlotClaim) -> None:
    name, rows = "unique_rows", claim.unique_rows
    _check_rows(name, rows)
    for scalar_name, scalar, dtype, advice in (
        ("num_unique", claim.num_unique, torch.int32, "take it from find_runs"),
        ("epoch", claim.epoch, torch.int64, "call .long()"),
        ("released", claim.released, torch.int64, "call .long()"),
        ("is_trained", claim.is_trained, torch.bool, "call .bool()"),
    ):
        if scalar is not None:
            meaning = "a scalar in a tensor"
            _check_vector(scalar_name, scalar, dtype, advice, 1, meaning, name, rows)
    cache = claim.cache
    num_slots = cache.row_of_slot.numel()
    if isinstance(num_slots, int) and not 1 <= num_slots < MAX_SLOTS:
        raise ValueError(
            f"row_of_slot must hold at least one slot and fewer than 2**31, got {num_slots}; "
            f"{_OF_CACHE}"
        )
    _check_slot_of_row(cache.slot_of_row, name, rows)
    each_slot = (num_slots, "one for each slot")
    for part, tensor, dtype, numel, meaning in (
        ("row_of_slot", cache.row_of_slot, torch.int64, *each_slot),
        ("last_use", cache.last_use, torch.int64, *each_slot),
        ("is_recent", cache.is_recent, torch.bool, *each_slot),
        ("is_dirty", cache.is_dirty, torch.bool, *each_slot),
        ("hand", cache.hand, torch.int64, 1, "a slot"),
        ("counters", cache.counters, torch.int64, len(CacheCounter), "one for each CacheCounter"),
    ):
        _check_vector(part, tensor, dtype, _OF_CACHE, numel, meaning, name, rows)


def check_claim_slots_contents(claim: SlotClaim) -> None:
    cache = claim.cache
    num_rows, num_slots = cache.slot_of_row.numel(), cache.row_of_slot.numel()
    contents.check_in_range(
        "num_unique", claim.num_unique, 0, claim.unique_rows.numel() + 1, _OF_RUNS
    )
    wanted = claim.unique_rows[: int(claim.num_unique)]
    contents.check_in_range("unique_rows", wanted, 0, num_rows, _OF_RUNS)
    contents.check_ascending("unique_rows", wanted, _OF_RUNS, distinct=True)
    contents.check_in_range("slot_of_row", cache.slot_of_row, -1, num_slots, _OF_CACHE)
    contents.check_in_range("row_of_slot", cache.row_of_slot, -1, num_rows, _OF_CACHE)
    contents.check_in_range("hand", cache.hand, 0, num_slots, _OF_CACHE)
    if int(claim.released) >= int(claim.epoch):
        raise ValueError(
            f"released must be less than epoch, {int(claim.epoch)}, since this batch is not "
            f"trained yet, got {int(claim.released)}"
        )


def _check_lines(name: str, tensors: list[Tensor], index: int) -> None:
    """Checks that ``tensors[index]`` has as many rows as the first one."""
    tensor, first = tensors[index], tensors[0]
    if first.dim() == 0:
        raise ValueError(f"{name}[0] must have at least one dimension, got a scalar")
    if tensor.dim() == 0 or tensor.shape[0] != first.shape[0]:
        raise ValueError(
            f"{name}[{index}] must have {first.shape[0]} rows as {name}[0] has, "
            f"got shape {tuple(tensor.shape)}"
        )


def _check_pair(move: RowMove, index: int) -> None:
    _check_lines("cached", move.cached, index)
    _check_lines("stored", move.stored, index)
    first, cached, stored = move.cached[0], move.cached[index], move.stored[index]
    cached_name, stored_name = f"cached[{index}]", f"stored[{index}]"
    checks.check_contiguous(cached_name, cached)
    checks.check_apart_rows(stored_name, stored)
    if stored.dtype is not cached.dtype:
        raise TypeError(
            f"{stored_name} must be {checks.dtype_name(cached.dtype)} as {cached_name} is, "
            f"got {checks.dtype_name(stored.dtype)}; cast one of them"
        )
    if stored.shape[1:] != cached.shape[1:]:
        raise ValueError(
            f"{stored_name} must have rows of shape {tuple(cached.shape[1:])} as {cached_name} "
            f"has, got {tuple(stored.shape[1:])}"
        )
    checks.check_same_device("cached[0]", first, **{cached_name: cached})
    checks.check_reachable(stored_name, stored, cached_name, cached)


def _check_moves(moves: RowMove | PlaceExchange, like_name: str, like: Tensor) -> None:
    num_moves = moves.slots.numel()
    for name, tensor, dtype, numel, meaning in (
        ("slots", moves.slots, torch.int32, num_moves, "one for each move"),
        ("written_rows", moves.written_rows, torch.int64, num_moves, "one for each move"),
        ("read_rows", moves.read_rows, torch.int64, num_moves, "one for each move"),
        ("count", moves.count, torch.int64, 1, "the number of moves"),
    ):
        _check_vector(name, tensor, dtype, _OF_MOVES, numel, meaning, like_name, like)


def check_exchange_places(exchange: PlaceExchange) -> None:
    slots, places = exchange.slots, exchange.place_of_row
    _check_moves(exchange, "slots", slots)
    of_places = "place_of_row", places, torch.int32, "call .int()"
    _check_vector(*of_places, places.numel(), "one for each row", "slots", slots)


def check_exchange_places_contents(exchange: PlaceExchange) -> None:
    contents.check_in_range("count", exchange.count, 0, exchange.slots.numel() + 1, _OF_MOVES)
    num_moves, num_rows = int(exchange.count), exchange.place_of_row.numel()
    written, read = exchange.written_rows[:num_moves], exchange.read_rows[:num_moves]
    contents.check_in_range("written_rows", written, -1, num_rows, _OF_MOVES)
    contents.check_in_range("read_rows", read, 0, num_rows, _OF_MOVES)
    contents.check_in_range(
        "place_of_row", exchange.place_of_row, 0, num_rows, "give each row a place of its own"
    )


def check_move_rows(move: RowMove) -> None:
    if not move.cached or len(move.stored) != len(move.cached):
        raise ValueError(
            f"cached and stored must hold as many tensors, at least one, got {len(move.cached)} "
            f"and {len(move.stored)}"
        )
    _check_moves(move, "cached[0]", move.cached[0])
    for index in range(len(move.cached)):
        _check_pair(move, index)


def check_move_rows_contents(move: RowMove) -> None:
    contents.check_in_range("count", move.count, 0, move.slots.numel() + 1, _OF_MOVES)
    num_moves, num_rows = int(move.count), move.stored[0].shape[0]
    contents.check_in_range("slots", move.slots[:num_moves], 0, move.cached[0].shape[0], _OF_MOVES)
    for name, rows in (("written_rows", move.written_rows), ("read_rows", move.read_rows)):
        contents.check_in_range(name, rows[:num_moves], -1, num_rows, _OF_MOVES)


def check_find_cached(
    slot_of_row: Tensor, rows: Tensor, num_rows: Tensor | None, no_slot: int
) -> None:
    _check_rows("rows", rows)
    _check_slot_of_row(slot_of_row, "rows", rows)
    if num_rows is not None:
        _check_vector(
            *("num_rows", num_rows, torch.int32, _OF_RUNS),
            *(1, "a scalar in a tensor", "rows", rows),
        )
    limits = torch.iinfo(rows.dtype)
    if not limits.min <= no_slot <= limits.max:
        raise ValueError(
            f"no_slot must fit {checks.dtype_name(rows.dtype)} as rows are, got {no_slot}"
        )


def check_find_cached_contents(
    slot_of_row: Tensor, rows: Tensor, num_rows: Tensor | None, no_slot: int
) -> None:
    if num_rows is not None:
        contents.check_in_range("num_rows", num_rows, 0, rows.numel() + 1, _OF_RUNS)
        rows = rows[: int(num_rows)]
    contents.check_rows(rows, slot_of_row.numel())


def check_read_rows(cached: Tensor, stored: Tensor, slots: Tensor, rows: Tensor) -> None:
    checks.check_matrix("cached", cached)
    checks.check_float("stored", stored)
    checks.check_dim("stored", stored, 2)
    checks.check_apart_rows("stored", stored)
    if stored.dtype is not cached.dtype:
        raise TypeError(
            f"stored must be {checks.dtype_name(cached.dtype)} as cached is, "
            f"got {checks.dtype_name(stored.dtype)}; cast one of them"
        )
    if stored.shape[1] != cached.shape[1]:
        raise ValueError(
            f"stored must have {cached.shape[1]} columns as cached has, got {stored.shape[1]}"
        )
    _check_rows("rows", rows)
    checks.check_ids("slots", slots)
    checks.check_memory("slots", slots, rows.shape, "one for each row", "rows", rows)
    checks.check_same_device("rows", rows, cached=cached)
    checks.check_reachable("stored", stored, "rows", rows)


def check_read_rows_contents(cached: Tensor, stored: Tensor, slots: Tensor, rows: Tensor) -> None:
    contents.check_in_range("slots", slots, -1, cached.shape[0], "take them from find_cached")
    contents.check_rows(rows, stored.shape[0])
