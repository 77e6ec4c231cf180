"""Levels of rows whose Redis is killed amid traffic, and comes back with what it had, or empty."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.redis_servers import RedisServer, redis_server
from torchembed.serving.levels import RowFormat, RowLevels, ServedTable
from torchembed.stores import (
    MemoryStore,
    RedisOptions,
    RedisStore,
    RocksDBStore,
    RowStore,
    VolatileMemoryStore,
    VolatileOptions,
)

TABLE = ServedTable(name="m/t", dim=4, row_format=RowFormat.FP32)
NUM_KEYS = 300
LIMIT_SECONDS = 300.0

UPPERMOST: dict[str, Callable[[], RowStore]] = {
    "memory": MemoryStore,
    # Of so few rows that most are read from Redis.
    "bounded memory": lambda: VolatileMemoryStore(
        VolatileOptions(num_partitions=2, overflow_margin_rows=20)
    ),
}


class Traffic:
    """Threads that read and update rows. Rows carry a number that grows with each update of their
    key; where it is odd, the row is deleted. A reader must see a number between the one that was
    done before it began and the one that was begun when it ended."""

    def __init__(self, levels: RowLevels) -> None:
        self._levels = levels
        self._begun = np.zeros(NUM_KEYS, dtype=np.int64)
        self._done = np.zeros(NUM_KEYS, dtype=np.int64)
        self.num_reads = self.num_updates = 0
        self.failures: list[BaseException] = []
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._until_over, args=(use, np.random.default_rng(seed)))
            for seed, use in enumerate((self._read, self._read, self._update))
        ]

    def __enter__(self) -> Self:
        self._levels.write(TABLE.name, torch.arange(NUM_KEYS), self._rows(np.arange(NUM_KEYS)))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def go_on(self, num_calls: int = 60) -> None:
        """Return after some more reads and updates."""
        reads, updates = self.num_reads + num_calls, self.num_updates + num_calls
        self.wait_for(lambda: self.num_reads >= reads and self.num_updates >= updates)

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT_SECONDS
        while not is_so():
            assert not self.failures, self.failures
            assert time.monotonic() < end, self._levels.statistics()
            time.sleep(0.01)

    def check(self, store: RowStore, *, is_whole: bool) -> None:
        """Check that a store holds no rows but those of now, and, where ``is_whole``, all."""
        keys = np.arange(NUM_KEYS)
        lines = torch.empty(NUM_KEYS, TABLE.line_bytes, dtype=torch.uint8)
        found = store.table(TABLE.name, TABLE.line_bytes).read(torch.from_numpy(keys), lines)
        is_there = self._done % 2 == 0
        assert not (found.numpy() & ~is_there).any()
        assert torch.equal(TABLE.row_format.decode(lines, 4)[found], self._rows(keys)[found])
        if is_whole:
            assert (found.numpy() == is_there).all()

    def _until_over(
        self, use: Callable[[np.random.Generator], None], random: np.random.Generator
    ) -> None:
        try:
            while not self._is_over.is_set():
                use(random)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.failures.append(error)

    def _rows(self, keys: np.ndarray) -> Tensor:
        numbers = np.stack([self._begun[keys], keys] * 2, axis=1)
        return torch.from_numpy(numbers.astype(np.float32))

    def _read(self, random: np.random.Generator) -> None:
        keys = random.integers(0, NUM_KEYS, 40)
        first = self._done[keys]
        read = self._levels.read(TABLE.name, torch.from_numpy(keys))
        last = self._begun[keys]
        rows = TABLE.row_format.decode(read.lines, 4).numpy()
        for n, is_found in enumerate(read.is_found.tolist()):
            if is_found:
                number, key = int(rows[n, 0]), int(rows[n, 1])
                assert rows[n].tolist() == [number, keys[n]] * 2, key
                assert first[n] <= number <= last[n]
            else:
                assert first[n] % 2 or first[n] < last[n]
        self.num_reads += 1

    def _update(self, random: np.random.Generator) -> None:
        keys = random.choice(NUM_KEYS, 20, replace=False)
        is_deletion = random.random() < 0.3
        is_odd = self._begun[keys] % 2 == 1
        self._begun[keys] += np.where(is_odd == is_deletion, 2, 1)
        if is_deletion:
            self._levels.delete(TABLE.name, torch.from_numpy(keys))
        else:
            self._levels.write(TABLE.name, torch.from_numpy(keys), self._rows(keys))
        self._done[keys] = self._begun[keys]
        self.num_updates += 1


@pytest.mark.parametrize(
    ("uppermost", "keeps_rows", "max_missed_keys"),
    [
        ("memory", "yes", 1 << 20),
        ("bounded memory", "yes", 1 << 20),
        ("bounded memory", "no", 1 << 20),
        ("bounded memory", "yes", 10),
    ],
)
def test_answers_go_on_and_are_never_stale(
    tmp_path: Path, uppermost: str, keeps_rows: str, max_missed_keys: int
) -> None:
    # By default Redis may acknowledge what it then loses where it is killed within two seconds.
    with redis_server("--appendonly", keeps_rows, "--appendfsync", "always") as server:
        kill_amid_traffic(server, tmp_path, UPPERMOST[uppermost](), max_missed_keys)


def kill_amid_traffic(
    server: RedisServer, folder: Path, uppermost: RowStore, max_missed_keys: int
) -> None:
    options = RedisOptions(addresses=(server.address,), timeout_seconds=60.0)
    with (
        uppermost as memory,
        RedisStore(options, VolatileOptions(num_partitions=3)) as redis,
        RocksDBStore(folder / "rows") as disk,
    ):
        levels = RowLevels(
            [memory, redis, disk],
            [TABLE],
            names=["memory", "redis", "disk"],
            back_off_seconds=0.05,
            max_missed_keys=max_missed_keys,
        )
        with Traffic(levels) as traffic:
            traffic.go_on()
            server.kill()
            traffic.wait_for(lambda: levels.statistics()[1].is_away)
            traffic.go_on()
            away = levels.statistics()[1]
            assert away.is_away
            assert away.num_missed_keys == -1 or max_missed_keys > 10
            server.start()
            traffic.wait_for(lambda: not levels.statistics()[1].is_away)
            traffic.go_on()
        assert traffic.failures == []
        assert levels.statistics()[1].num_missed_keys == 0
        traffic.check(memory, is_whole=False)
        traffic.check(redis, is_whole=False)
        traffic.check(disk, is_whole=True)
        if not isinstance(memory, MemoryStore):
            assert levels.statistics()[1].num_hits > 0
