"""Hash tables beside Python dicts that note what they must hold."""

import dataclasses
from collections import Counter as Counts
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tests.support.hash_tables import Tables, int64
from torchembed.ops.hash_table import (
    Counter,
    InsertedKeys,
    Policy,
    SlotRange,
    TableShape,
    assign_scores,
    coldest,
    erase_if,
    erase_keys,
    export_keys,
    grow,
    locate_keys,
    slot_ranges,
)

_MAX_COUNT = 2**32 - 1


@dataclasses.dataclass
class Entry:
    """The notes of a table on a key."""

    slot: int
    score: int
    touched: int


class ModelledTables:
    """Tables, and for each a dict from its keys to their slots, scores and last uses.

    Which key goes where, and which one is evicted, is read from the operations' results; that it
    was there, was not in use, had no greater score, and that nothing else changed is checked.
    """

    def __init__(self, shapes: Sequence[TableShape], policy: Policy, device: torch.device) -> None:
        self.tables = Tables(list(shapes), policy, device)
        self.policy, self.device = policy, device
        self.entries: list[dict[int, Entry]] = [{} for _ in shapes]
        self.by_slot: dict[int, tuple[int, int]] = {}
        self.counts: list[Counts[Counter]] = [Counts() for _ in shapes]
        self.released = self.epoch_number = 0
        self.num_operations = 0

    @property
    def epoch(self) -> int:
        return self.tables.epoch

    def find(self, keys: Tensor, tables: Sequence[int]) -> None:
        self.num_operations += len(tables)
        assert self.tables.find(keys, tables).tolist() == self._slots(keys.tolist(), tables)

    def train(
        self,
        keys: Tensor,
        tables: Sequence[int],
        *,
        scores: Sequence[int],
        num_under_way: int = 0,
        is_trained: bool = True,
    ) -> None:
        """Admit a batch while the ``num_under_way`` batches before it are trained."""
        self.num_operations += len(tables)
        epoch = self.epoch + 1
        self.released = max(self.released, epoch - 1 - num_under_way)
        given = scores if self.policy is Policy.CALLER else None
        result = self.tables.train(
            keys,
            tables,
            scores=given,
            is_trained=is_trained,
            released=self.released,
            epoch_number=self.epoch_number,
        )
        numbers = keys.tolist()
        if is_trained:
            self._note(numbers, tables, scores, result)
        else:
            assert int(result.num_new) == 0
        assert result.slots.tolist() == self._slots(numbers, tables)

    def erase(self, keys: Tensor, tables: Sequence[int]) -> None:
        self.num_operations += len(tables)
        numbers = self.tables.numbers(keys, tables)
        slots = erase_keys(self.tables.tables, keys, numbers, released=self._scalar(self.released))
        expected = []
        for key, table in zip(keys.tolist(), tables, strict=True):
            entry = self.entries[table].get(key) if table >= 0 else None
            is_free = entry is not None and entry.touched <= self.released
            expected.append(entry.slot if entry is not None and is_free else -1)
        assert slots.tolist() == expected
        for table, key in set(zip(tables, keys.tolist(), strict=True)):
            if table >= 0 and key in self.entries[table]:
                if self.entries[table][key].touched > self.released:
                    self.counts[table][Counter.IN_USE] += 1
                else:
                    self._remove(table, key, Counter.ERASED)

    def assign(self, keys: Tensor, tables: Sequence[int], scores: Sequence[int]) -> None:
        self.num_operations += len(tables)
        numbers = self.tables.numbers(keys, tables)
        given = torch.tensor(scores, dtype=torch.int64, device=self.device)
        assign_scores(self.tables.tables, keys, numbers, given)
        greatest: dict[tuple[int, int], int] = {}
        for key, table, score in zip(keys.tolist(), tables, scores, strict=True):
            greatest[table, key] = max(greatest.get((table, key), score), score)
        for (table, key), score in greatest.items():
            if table >= 0 and key in self.entries[table]:
                self.entries[table][key].score = score

    def expire(self, table: int, touched_below: int) -> None:
        (slots, touched) = self._state_of(table)
        self._erase_if(slots, touched < touched_below, Counter.EVICTED_EXPIRED)
        keys = [key for key, entry in self._free(table) if entry.touched < touched_below]
        for key in keys:
            self._remove(table, key, Counter.EVICTED_EXPIRED)

    def shrink(self, table: int, num_kept: int) -> None:
        slots, _ = self._state_of(table)
        released = self._scalar(self.released)
        chosen = coldest(self.tables.tables, slots, self._scalar(num_kept), released=released)
        self._erase_if(slots, chosen, Counter.EVICTED_TARGET)
        free = sorted(
            (entry.score, entry.touched, entry.slot, key) for key, entry in self._free(table)
        )
        for *_, key in free[: max(len(self.entries[table]) - num_kept, 0)]:
            self._remove(table, key, Counter.EVICTED_TARGET)

    def grow(self, table: int) -> None:
        shapes = list(self.tables.shapes)
        new_shapes = list(shapes)
        new_shapes[table] = shapes[table]._replace(num_blocks=2 * shapes[table].num_blocks)
        grown, new_slots = grow(self.tables.tables, shapes, new_shapes)
        self.tables = Tables.of(grown, new_shapes, self.policy, epoch=self.epoch)
        moved = new_slots.tolist()
        for entries in self.entries:
            for entry in entries.values():
                entry.slot = moved[entry.slot]
        self.by_slot = {moved[slot]: held for slot, held in self.by_slot.items()}
        assert -1 not in self.by_slot

    def check(self, piece: int = 7) -> None:
        """The tables hold what the dicts do, and count what happened."""
        for table, whole in enumerate(slot_ranges(self.tables.shapes)):
            rows = []
            for part in whole.pieces(piece):
                result = export_keys(self.tables.tables, part)
                columns = (result.slots, result.keys, result.scores, result.touched)
                num_keys = int(result.num_keys)
                rows += zip(*[column[:num_keys].tolist() for column in columns], strict=True)
            entries = self.entries[table]
            assert rows == sorted(
                (entry.slot, key, entry.score, entry.touched) for key, entry in entries.items()
            )
            counted = self.counts[table]
            counters = dict(zip(Counter, self.tables.tables.counters[table].tolist(), strict=True))
            assert counters == {counter: counted[counter] for counter in Counter}
            evicted = sum(
                counters[name]
                for name in (Counter.EVICTED_FULL, Counter.EVICTED_EXPIRED, Counter.EVICTED_TARGET)
            )
            gone = evicted + counters[Counter.ERASED]
            assert len(entries) == counters[Counter.SIZE] == counters[Counter.INSERTED] - gone

    def _note(
        self,
        keys: list[int],
        tables: Sequence[int],
        scores: Sequence[int],
        result: InsertedKeys,
    ) -> None:
        """Note what a trained batch did."""
        epoch = self.epoch
        occurrences: dict[tuple[int, int], list[int]] = {}
        for key, table, score in zip(keys, tables, scores, strict=True):
            if table >= 0:
                occurrences.setdefault((table, key), []).append(score)
        pending: dict[tuple[int, int], int] = {}
        for (table, key), given in occurrences.items():
            entry = self.entries[table].get(key)
            hit_or_miss = Counter.MISSES if entry is None else Counter.HITS
            self.counts[table][hit_or_miss] += len(given)
            if entry is None:
                pending[table, key] = self._score(0, given)
            else:
                entry.touched = epoch
                entry.score = self._score(entry.score, given)
        num_new = int(result.num_new)
        for new in zip(*[column[:num_new].tolist() for column in _of_new(result)], strict=True):
            key, table, slot, is_evicted, evicted_key, evicted_score, evicted_touched = new
            score = pending.pop((table, key))
            if is_evicted:
                evicted = self.entries[table][evicted_key]
                assert (slot, evicted_score, evicted_touched) == dataclasses.astuple(evicted)
                assert evicted_touched <= self.released and evicted_score <= score
                self._remove(table, evicted_key, Counter.EVICTED_FULL)
            assert slot not in self.by_slot
            self.entries[table][key] = Entry(slot, score, epoch)
            self.by_slot[slot] = table, key
            self.counts[table].update((Counter.INSERTED, Counter.SIZE))
        self._check_refused(pending)

    def _check_refused(self, refused: dict[tuple[int, int], int]) -> None:
        """Keys are refused where all rows of both buckets are in use or have greater scores."""
        for (table, key), score in refused.items():
            self.counts[table][Counter.REFUSED] += 1
            ids = int64(key, device=self.device)
            numbers = self.tables.numbers(ids, table)
            places = locate_keys(ids, numbers, self.tables.tables.geometry)
            for first in places.buckets[0].tolist():
                for slot in range(first, first + int(places.num_slots)):
                    entry = self.entries[table][self.by_slot[slot][1]]
                    assert entry.touched > self.released or entry.score > score

    def _score(self, old: int, given: list[int]) -> int:
        if self.policy is Policy.LRU:
            return self.epoch
        if self.policy is Policy.LFU:
            return old + len(given)
        if self.policy is Policy.CALLER:
            return max(given)
        return self.epoch_number << 32 | min((old & _MAX_COUNT) + len(given), _MAX_COUNT)

    def _erase_if(self, slots: SlotRange, chosen: Tensor, reason: Counter) -> None:
        epoch, released = self._scalar(self.epoch), self._scalar(self.released)
        erase_if(self.tables.tables, slots, chosen, reason=reason, epoch=epoch, released=released)

    def _remove(self, table: int, key: int, reason: Counter) -> None:
        entry = self.entries[table].pop(key)
        del self.by_slot[entry.slot]
        counts = self.counts[table]
        counts[reason] += 1
        counts[Counter.SIZE] -= 1
        if reason is not Counter.ERASED:
            counts[Counter.EVICTED_AGE] += self.epoch - entry.touched

    def _free(self, table: int) -> Iterable[tuple[int, Entry]]:
        """Keys whose rows are not in use."""
        entries = self.entries[table].items()
        return [(key, entry) for key, entry in entries if entry.touched <= self.released]

    def _slots(self, keys: list[int], tables: Sequence[int]) -> list[int]:
        return [
            self.entries[table][key].slot if table >= 0 and key in self.entries[table] else -1
            for key, table in zip(keys, tables, strict=True)
        ]

    def _state_of(self, table: int) -> tuple[SlotRange, Tensor]:
        slots = slot_ranges(self.tables.shapes)[table]
        return slots, slots.of(self.tables.tables.touched)

    def _scalar(self, number: int) -> Tensor:
        return int64(number, device=self.device)


def _of_new(result: InsertedKeys) -> tuple[Tensor, ...]:
    return (
        result.keys,
        result.tables,
        result.new_slots,
        result.is_evicted,
        result.evicted_keys,
        result.evicted_scores,
        result.evicted_touched,
    )
