"""Levels that stay away: others take updates meanwhile, and nothing stale is answered afterwards,
not even by the next process."""

import dataclasses
import threading
from pathlib import Path

import pytest
import torch

from tests.support.redis_servers import redis_server
from tests.support.waiting import wait_until
from torchembed.serving.levels import RowLevels, ServedTable
from torchembed.stores import (
    MemoryStore,
    RedisOptions,
    RedisStore,
    RocksDBStore,
    RowStore,
    StoreUnavailableError,
)

TABLE = ServedTable(name="t", dim=2)
KEYS = torch.arange(50)


class Hanging(MemoryStore):
    """A store that answers nothing until it is let go, once it has failed."""

    def __init__(self) -> None:
        super().__init__()
        self.is_away = False
        self.let_go = threading.Event()
        self.num_asked = 0

    def tables(self) -> dict[str, int]:
        self.num_asked += 1
        if self.is_away:
            assert self.let_go.wait(60)
        return super().tables()

    def table(self, name: str, line_bytes: int):
        table = super().table(name, line_bytes)
        write = table.write

        def failing(keys: torch.Tensor, lines: torch.Tensor) -> None:
            if self.is_away:
                raise StoreUnavailableError("away")
            write(keys, lines)

        table.write = failing  # type: ignore[method-assign]
        return table


def write(levels: RowLevels, number: float) -> None:
    levels.write("t", KEYS, torch.full((len(KEYS), 2), number))


def numbers(levels: RowLevels) -> set[float]:
    read = levels.read("t", KEYS)
    assert read.is_found.all()
    return set(read.lines.view(torch.float32).flatten().tolist())


def test_one_that_answers_late_holds_up_no_update() -> None:
    with Hanging() as upper, MemoryStore() as lower:
        levels = RowLevels([upper, lower], [TABLE], names=["u", "l"], back_off_seconds=0.0)
        write(levels, 1.0)
        upper.is_away = True
        for number in range(2, 12):
            # Were one of them to wait for the store, none would let it go.
            write(levels, float(number))
            assert numbers(levels) == {number}
            # Also while it is asked to delete them.
            assert levels.statistics()[0].num_missed_keys == len(KEYS)
        assert levels.statistics()[0].is_away and upper.num_asked == 1
        upper.is_away = False
        upper.let_go.set()
        # Lookups ask whether it is back, as updates do.
        wait_until(lambda: numbers(levels) == {11.0} and not levels.statistics()[0].is_away)
        write(levels, 12.0)
        assert upper.table("t", 8).num_rows() == len(KEYS)


@pytest.mark.parametrize("crashes", [False, True])
def test_what_redis_missed_is_not_answered_by_it(tmp_path: Path, crashes: bool) -> None:
    def over(redis: RowStore, disk: RowStore) -> RowLevels:
        stores, names = [redis, disk], ["redis", "disk"]
        return RowLevels(stores, [TABLE], names=names, back_off_seconds=0.0, records=disk)

    with redis_server() as server, RocksDBStore(tmp_path / "rows") as disk:
        options = RedisOptions(addresses=(server.address,))
        impatient = dataclasses.replace(options, timeout_seconds=1.0)
        with RedisStore(options) as redis, RedisStore(impatient) as first:
            levels = over(first, disk)
            write(levels, 1.0)
            with server.stopped():
                for number in range(2, 30):
                    write(levels, float(number))
                assert levels.statistics()[0].num_missed_keys == len(KEYS)
                if crashes:
                    # Its thread would bring Redis back as soon as that answers; so it cannot.
                    first.close()
            if crashes:
                # What the process knew is gone; Redis has kept the rows of before.
                redis.table("t", 8).write(KEYS, torch.ones(len(KEYS), 2).view(torch.uint8))
                levels = over(redis, disk)
                assert levels.statistics()[0].is_away
            table = redis.table("t", 8)
            wait_until(lambda: numbers(levels) == {29.0} and not levels.statistics()[0].is_away)
            wait_until(lambda: numbers(levels) == {29.0} and table.num_rows() == len(KEYS))
            # It has the rows again, and the next process does not empty it.
            assert over(redis, disk).statistics()[0].is_away is False
            assert table.num_rows() == len(KEYS)
