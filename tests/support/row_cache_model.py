"""A cache of rows as a plain Python program, beside one that operations change."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.ops.row_cache import (
    CacheCounter,
    RowMoves,
    claim_slots,
    dirty_moves,
    empty_row_cache,
    find_cached,
    forget_rows,
    move_rows,
    read_rows,
)
from torchembed.ops.segments import find_runs

Move = tuple[int, int, int]
"""Slot, row written, row read."""


def moves_of(moves: RowMoves) -> list[Move]:
    """The moves up to ``count``; what follows is -1."""
    count = int(moves.count)
    for rows in moves[:3]:
        assert rows[count:].tolist() == [-1] * (rows.numel() - count)
    columns = (rows[:count].tolist() for rows in moves[:3])
    return list(zip(*columns, strict=True))


def row_moves(device: torch.device, *given: tuple[int, int, int]) -> RowMoves:
    """Moves of (slot, row written, row read), with a place behind them."""
    slots, written, read = zip(*given, (-1, -1, -1), strict=True)
    return RowMoves(
        torch.tensor(slots, dtype=torch.int32, device=device),
        torch.tensor(written, device=device),
        torch.tensor(read, device=device),
        torch.tensor([len(given)], device=device),
    )


@dataclasses.dataclass
class Slot:
    row: int = -1
    last_use: int = 0
    is_recent: bool = False
    is_dirty: bool = False


class PlainCache:
    """The contents of a cache, as :func:`torchembed.ops.row_cache.claim_slots` says."""

    def __init__(self, num_slots: int) -> None:
        self.slots = [Slot() for _ in range(num_slots)]
        self.slot_of: dict[int, int] = {}
        self.hand = 0
        self.counters = [0] * len(CacheCounter)

    def claim(
        self, ids: Sequence[int], epoch: int, released: int, is_trained: bool
    ) -> tuple[list[Move], int]:
        """The moves, and the number of slots that were too few."""
        return self._claim(ids, epoch, released) if is_trained else ([], 0)

    def _claim(self, ids: Sequence[int], epoch: int, released: int) -> tuple[list[Move], int]:
        wanted = sorted({row for row in ids if row >= 0})
        missing = [row for row in wanted if row not in self.slot_of]
        held = {self.slot_of[row] for row in wanted if row in self.slot_of}
        for number in held:
            self._use(number, epoch)
        self._count(CacheCounter.UNIQUE_ROWS, len(wanted))
        self._count(CacheCounter.UNIQUE_MISSES, len(missing))

        def is_evictable(number: int) -> bool:
            slot = self.slots[number]
            return slot.row < 0 or slot.last_use <= released

        too_few = len(missing) - sum(map(is_evictable, range(len(self.slots))))
        if too_few > 0:
            self._count(CacheCounter.REFUSED_BATCHES, 1)
            return [], too_few
        victims: list[int] = []
        for takes_recent in (False, True):
            for step in range(len(self.slots)):
                if len(victims) == len(missing):
                    break
                number = (self.hand + step) % len(self.slots)
                slot = self.slots[number]
                may_go = is_evictable(number) and number not in victims
                if may_go and (takes_recent or not slot.is_recent):
                    victims.append(number)
                slot.is_recent = slot.is_recent and slot.last_use == epoch
        if victims:
            self.hand = (victims[-1] + 1) % len(self.slots)
        moves = []
        for row, number in zip(missing, victims, strict=True):
            slot = self.slots[number]
            moves.append((number, slot.row if slot.is_dirty else -1, row))
            self.slot_of.pop(slot.row, None)
            self.slot_of[row], slot.row = number, row
            self._use(number, epoch)
        self._count(CacheCounter.WRITTEN_ROWS, sum(written >= 0 for _, written, _ in moves))
        self._count(CacheCounter.READ_ROWS, len(moves))
        return moves, 0

    def _use(self, number: int, epoch: int) -> None:
        slot = self.slots[number]
        slot.last_use, slot.is_recent, slot.is_dirty = epoch, True, True

    def _count(self, counter: CacheCounter, by: int) -> None:
        self.counters[counter] += by

    def write_dirty(self) -> list[Move]:
        moves = [(number, slot.row, -1) for number, slot in enumerate(self.slots) if slot.is_dirty]
        for slot in self.slots:
            slot.is_dirty = False
        self._count(CacheCounter.WRITTEN_ROWS, len(moves))
        return moves

    def forget(self) -> None:
        self.slots = [Slot() for _ in self.slots]
        self.slot_of.clear()
        self.hand = 0


class ModelledCache:
    """A cache, the rows that it is for, and a Python program that does the same.

    Rows have a weight ``[R, 3]`` in bfloat16 and a state ``[R]`` in float32. Training adds 1 to the
    state of each row that a batch has, and sets its weight to what the state is.
    """

    def __init__(self, num_rows: int, num_slots: int, device: torch.device) -> None:
        self.cache = empty_row_cache(num_rows, num_slots, device)
        self.plain = PlainCache(num_slots)
        self.device = device
        self.cached = [
            torch.full((num_slots, 3), -1, dtype=torch.bfloat16, device=device),
            torch.full((num_slots,), -1.0, device=device),
        ]
        is_cuda = device.type == "cuda"
        self.stored = [
            torch.zeros(num_rows, 3, dtype=torch.bfloat16, pin_memory=is_cuda),
            torch.zeros(num_rows, pin_memory=is_cuda),
        ]
        self.truth = [0] * num_rows
        """How often each row was trained."""
        self.epoch = 0
        self.under_way: list[list[int]] = []
        """Batches whose slots were claimed, and that were not trained yet."""

    def claim(
        self, ids: Sequence[int], *, is_trained: bool = True, dtype: torch.dtype = torch.int64
    ) -> None:
        """Claim the slots of a batch and move its rows."""
        self.epoch += 1
        released = self.epoch - 1 - len(self.under_way)
        rows = torch.tensor(list(ids), dtype=dtype, device=self.device)
        runs = find_runs(rows, len(self.truth))
        claimed = claim_slots(
            self.cache,
            runs.unique_rows,
            runs.num_runs,
            epoch=torch.tensor([self.epoch], device=self.device),
            released=torch.tensor([released], device=self.device),
            is_trained=None if is_trained else torch.tensor([False], device=self.device),
        )
        moves, num_refused = self.plain.claim(ids, self.epoch, released, is_trained)
        slots = find_cached(self.cache.slot_of_row, rows)
        assert slots.dtype == dtype
        assert slots.tolist() == [self.plain.slot_of.get(row, -1) for row in ids]
        assert claimed.num_refused.tolist() == [num_refused]
        self._move(claimed.moves, moves, min(len(ids), len(self.plain.slots)))
        is_admitted = is_trained and num_refused == 0
        self.under_way.append(sorted({row for row in ids if row >= 0}) if is_admitted else [])

    def train(self) -> None:
        """Train the oldest batch under way."""
        batch = self.under_way.pop(0)
        numbers = torch.tensor([self.plain.slot_of[row] for row in batch], device=self.device)
        if batch:
            self.cached[1][numbers] += 1
            self.cached[0][numbers] = self.cached[1][numbers].bfloat16()[:, None]
        for row in batch:
            self.truth[row] += 1

    def write_dirty(self) -> None:
        """Train what is under way, and write back every row that may differ."""
        while self.under_way:
            self.train()
        self._move(dirty_moves(self.cache), self.plain.write_dirty(), len(self.plain.slots))

    def forget(self) -> None:
        self.write_dirty()
        forget_rows(self.cache)
        self.plain.forget()

    def _move(self, moves: RowMoves, expected: list[Move], capacity: int) -> None:
        assert [rows.numel() for rows in moves] == [capacity] * 3 + [1]
        assert moves_of(moves) == expected
        move_rows(moves, self.cached, self.stored)

    def check(self) -> None:
        """The cache is what the plain one is, and every row is where it says."""
        cache, slots = self.cache, self.plain.slots
        assert cache.row_of_slot.tolist() == [slot.row for slot in slots]
        assert cache.last_use.tolist() == [slot.last_use for slot in slots]
        assert cache.is_recent.tolist() == [slot.is_recent for slot in slots]
        assert cache.is_dirty.tolist() == [slot.is_dirty for slot in slots]
        assert cache.hand.tolist() == [self.plain.hand]
        assert cache.counters.tolist() == self.plain.counters
        slot_of = [self.plain.slot_of.get(row, -1) for row in range(len(self.truth))]
        assert cache.slot_of_row.tolist() == slot_of
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        rows = torch.arange(len(self.truth), device=self.device)
        weights = read_rows(self.cached[0], self.stored[0], cache.slot_of_row, rows)
        expected = torch.tensor(self.truth).bfloat16()[:, None].expand(-1, 3)
        assert torch.equal(weights.cpu(), expected)
        cached, stored = self.cached[1].tolist(), self.stored[1].tolist()
        for row, slot in enumerate(slot_of):
            assert (cached[slot] if slot >= 0 else stored[row]) == self.truth[row]
        for number, slot in enumerate(slots):
            assert slot.row < 0 or slot.is_dirty or stored[slot.row] == cached[number]
        for weight, state in zip(
            (self.cached[0], self.stored[0]), (self.cached[1], self.stored[1]), strict=True
        ):
            assert_follows_state(weight, state)


def assert_follows_state(weight: Tensor, state: Tensor) -> None:
    """Both tensors of a row were moved together."""
    assert torch.equal(weight, state.bfloat16()[:, None].expand_as(weight))
