"""Stores under random histories, beside dictionaries."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.support.redis_servers import RedisServer
from torchembed.stores import (
    MemoryStore,
    OverflowPolicy,
    RedisOptions,
    RedisStore,
    RocksDBOptions,
    RocksDBStore,
    RowStore,
    VolatileMemoryStore,
    VolatileOptions,
)

LINE_BYTES = {"a": 3, "b": 1}
KEYS = st.sampled_from([-(2**63), -300, -1, 0, 1, 2, 300, 2**63 - 1])
TABLES = st.sampled_from(sorted(LINE_BYTES))

Model = dict[str, dict[int, bytes]]


def contents(store: RowStore, max_rows: int) -> Model:
    """All lines of a store, which must come in order."""
    found: Model = {name: {} for name in LINE_BYTES}
    for name, lines in found.items():
        keys = []
        for chunk in store.table(name, LINE_BYTES[name]).chunks(max_rows):
            keys += chunk.keys.tolist()
            lines |= zip(chunk.keys.tolist(), map(bytes, chunk.lines.tolist()), strict=True)
        assert keys == sorted(lines)
    return found


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.model: Model = {name: {} for name in LINE_BYTES}
        self.snapshots: list[tuple[RowStore, Model]] = []
        self.store = self.opened()
        for name, line_bytes in LINE_BYTES.items():
            self.store.table(name, line_bytes)

    def opened(self) -> RowStore:
        raise NotImplementedError

    @rule(name=TABLES, keys=st.lists(KEYS, max_size=12), data=st.data())
    def write(self, name: str, keys: list[int], data: st.DataObject) -> None:
        size = LINE_BYTES[name]
        lines = [data.draw(st.binary(min_size=size, max_size=size)) for _ in keys]
        joined = torch.tensor(list(b"".join(lines)), dtype=torch.uint8).view(-1, size)
        self.store.table(name, size).write(torch.tensor(keys, dtype=torch.int64), joined)
        self.model[name] |= zip(keys, lines, strict=True)

    @rule(name=TABLES, keys=st.lists(KEYS, max_size=4))
    def delete(self, name: str, keys: list[int]) -> None:
        table = self.store.table(name, LINE_BYTES[name])
        table.delete(torch.tensor(keys, dtype=torch.int64))
        for key in keys:
            self.model[name].pop(key, None)

    @rule(name=TABLES, keys=st.lists(KEYS, max_size=12))
    def read(self, name: str, keys: list[int]) -> None:
        size = LINE_BYTES[name]
        lines = torch.full((len(keys), size), 7, dtype=torch.uint8)
        table = self.store.table(name, size)
        found = table.read(torch.tensor(keys, dtype=torch.int64), lines)
        model = self.model[name]
        assert found.tolist() == [key in model for key in keys]
        expected = [model.get(key, b"\7" * size) for key in keys]
        assert list(map(bytes, lines.tolist())) == expected
        assert table.num_rows() == len(model)

    @rule()
    def take_snapshot(self) -> None:
        if len(self.snapshots) == 2:
            self.snapshots.pop(0)[0].close()
        model = {name: lines.copy() for name, lines in self.model.items()}
        self.snapshots.append((self.store.snapshot(), model))

    @rule(max_rows=st.integers(1, 9))
    def read_snapshots(self, max_rows: int) -> None:
        for snapshot, model in self.snapshots:
            assert contents(snapshot, max_rows) == model

    @rule()
    def sync(self) -> None:
        self.store.sync()

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert contents(self.store, 3) == self.model

    def teardown(self) -> None:
        for snapshot, _ in self.snapshots:
            snapshot.close()
        self.store.close()


class MemoryMachine(StoreMachine):
    def opened(self) -> RowStore:
        return MemoryStore()


class VolatileMemoryMachine(StoreMachine):
    def opened(self) -> RowStore:
        return VolatileMemoryStore(VolatileOptions(num_partitions=3, max_batch_rows=5))


class RedisMachine(StoreMachine):
    server: RedisServer

    def opened(self) -> RowStore:
        with self.server.client() as client:
            client.flushall()
        return self.reached()

    def reached(self) -> RedisStore:
        options = VolatileOptions(
            num_partitions=3, max_batch_rows=5, overflow_policy=OverflowPolicy.EVICT_LEAST_USED
        )
        return RedisStore(RedisOptions(addresses=(self.server.address,)), options)

    @rule()
    def open_again(self) -> None:
        self.store.close()
        self.store = self.reached()


class RocksDBMachine(StoreMachine):
    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        super().__init__()

    def opened(self) -> RowStore:
        return RocksDBStore(self.folder, RocksDBOptions(write_buffer_bytes=1 << 16))

    @rule()
    def open_again(self) -> None:
        self.store.close()
        self.store = self.opened()

    @rule()
    def go_on_from_a_checkpoint(self) -> None:
        assert isinstance(self.store, RocksDBStore)
        path = Path(tempfile.mkdtemp()) / "saved"
        self.store.checkpoint(path)
        self.store.close()
        self.folder, old = path, self.folder
        self.store = self.opened()
        # Snapshots of the store that was left are in its folder.
        for snapshot, _ in self.snapshots:
            snapshot.close()
        self.snapshots.clear()
        shutil.rmtree(old)

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.folder)


@pytest.mark.parametrize(
    ("machine", "num_examples"),
    [(MemoryMachine, 40), (VolatileMemoryMachine, 20), (RocksDBMachine, 8)],
)
def test_store(machine: Callable[[], StoreMachine], num_examples: int) -> None:
    settings = hypothesis.settings(max_examples=num_examples, stateful_step_count=25)
    run_state_machine_as_test(machine, settings=settings)


def test_redis(single_redis: RedisServer) -> None:
    machine = type("Machine", (RedisMachine,), {"server": single_redis})
    settings = hypothesis.settings(max_examples=10, stateful_step_count=25)
    run_state_machine_as_test(machine, settings=settings)
