"""Hash tables for tests: whole batches through find, touch and insert, and what tables hold."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.support.tolerance import assert_same_bits
from torchembed.ops.hash_table import (
    Counter,
    HashTables,
    InsertedKeys,
    Policy,
    TableShape,
    empty_hash_tables,
    find_slots,
    insert_keys,
    layout,
    touch_slots,
)

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
EXTREME_KEYS = (0, -1, 1, INT64_MIN, INT64_MAX, 2**31, -(2**31), 2**32 - 1)


def int64(*numbers: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def copy_of(tables: HashTables, device: torch.device | str | None = None) -> HashTables:
    """A copy, on ``device`` where one is given."""

    def copied(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device, copy=True)

    scores = None if tables.scores is None else copied(tables.scores)
    others = {name: copied(getattr(tables, name)) for name in tables._fields if name != "scores"}
    return HashTables(scores=scores, **others)


def held_keys(tables: HashTables, table: int = 0) -> dict[int, int]:
    """The slot of each key that a table holds; each key stands there once."""
    first, *shape = tables.geometry[table].tolist()
    slots = range(first, first + TableShape(*shape).num_rows)
    pairs = [(int(tables.keys[slot]), slot) for slot in slots if int(tables.digests[slot]) > 0]
    held = dict(pairs)
    assert len(held) == len(pairs)
    return held


def count(tables: HashTables, counter: Counter, table: int = 0) -> int:
    return int(tables.counters[table, counter])


def assert_equal_tables(tables: HashTables, expected: HashTables) -> None:
    for tensor, other in zip(tables, expected, strict=True):
        if tensor is not None and other is not None:
            assert_same_bits(tensor, other)


def assert_counters_add_up(tables: HashTables) -> None:
    for table in range(tables.geometry.shape[0]):
        counters = tables.counters[table]
        evicted = counters[Counter.EVICTED_FULL : Counter.EVICTED_TARGET + 1].sum()
        gone = evicted + counters[Counter.ERASED]
        assert counters[Counter.INSERTED] - gone == counters[Counter.SIZE]
        assert counters[Counter.SIZE] == len(held_keys(tables, table))


@dataclasses.dataclass
class Tables:
    """Tables of one policy, and the batches that they are given."""

    shapes: Sequence[TableShape]
    policy: Policy = Policy.LRU
    device: torch.device = torch.device("cpu")
    epoch: int = 0

    def __post_init__(self) -> None:
        self.tables = empty_hash_tables(self.shapes, self.policy, self.device)

    @classmethod
    def of(
        cls, tables: HashTables, shapes: Sequence[TableShape], policy: Policy, *, epoch: int = 0
    ) -> "Tables":
        """Tables that hold what ``tables`` do, in the same memory."""
        made = cls(shapes, policy, tables.digests.device, epoch)
        made.tables = tables
        return made

    def _ids(self, numbers: Sequence[int] | Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
        if isinstance(numbers, Tensor):
            return numbers.to(self.device)
        return torch.tensor(list(numbers), dtype=dtype, device=self.device)

    def numbers(self, keys: Tensor, tables: Sequence[int] | int) -> Tensor:
        if isinstance(tables, int):
            return torch.full(keys.shape, tables, dtype=torch.int32, device=self.device)
        return self._ids(tables, torch.int32)

    def find(self, keys: Sequence[int] | Tensor, tables: Sequence[int] | int = 0) -> Tensor:
        given = self._ids(keys)
        return find_slots(self.tables, given, self.numbers(given, tables))

    def train(
        self,
        keys: Sequence[int] | Tensor,
        tables: Sequence[int] | int = 0,
        *,
        scores: Sequence[int] | Tensor | None = None,
        wanted: Sequence[bool] | None = None,
        is_trained: bool | None = None,
        released: int | None = None,
        epoch_number: int = 0,
    ) -> InsertedKeys:
        """Find, touch and insert one batch, in the next epoch; all before are released unless
        ``released`` says otherwise."""
        self.epoch += 1
        device = self.device
        given = self._ids(keys)
        numbers = self.numbers(given, tables)
        epoch = int64(self.epoch, device=device)
        is_epoch_lfu = self.policy is Policy.EPOCH_LFU
        number = int64(epoch_number, device=device) if is_epoch_lfu else None
        new_scores = None if scores is None else self._ids(scores)
        trained = None if is_trained is None else torch.tensor([is_trained], device=device)
        slots = find_slots(self.tables, given, numbers)
        touch_slots(
            self.tables,
            slots,
            numbers,
            policy=self.policy,
            epoch=epoch,
            epoch_number=number,
            scores=new_scores,
            is_trained=trained,
        )
        return insert_keys(
            self.tables,
            given,
            numbers,
            slots,
            policy=self.policy,
            epoch=epoch,
            released=int64(self.epoch - 1 if released is None else released, device=device),
            epoch_number=number,
            scores=new_scores,
            wanted=None if wanted is None else self._ids(wanted, torch.bool),
            is_trained=trained,
        )

    def held(self, table: int = 0) -> dict[int, int]:
        return held_keys(self.tables, table)

    def count(self, counter: Counter, table: int = 0) -> int:
        return count(self.tables, counter, table)


def blocks_of(num_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tables that are made from now on have blocks of ``num_slots``, at most."""
    monkeypatch.setattr(layout, "BLOCK_SLOTS", num_slots)
