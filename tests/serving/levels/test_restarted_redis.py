"""A Redis that is killed and comes back with older rows than it had acknowledged: none is
answered, neither by this process nor by the next one."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.support.late_network import late_network
from tests.support.redis_servers import RedisServer, redis_cluster, redis_server, wait_for_cluster
from tests.support.waiting import wait_until
from torchembed.serving.levels import RowLevels, ServedTable
from torchembed.stores import (
    MemoryStore,
    RedisOptions,
    RedisStore,
    RocksDBStore,
    RowStore,
    StoreAccessError,
    VolatileOptions,
)

TABLE = ServedTable(name="m/t", dim=2)
OTHER = ServedTable(name="m/other", dim=2)
KEYS = torch.arange(100)
NUM_PARTITIONS = 16
NUM_THREADS = 4


def redis_at(*servers: RedisServer, timeout_seconds: float = 60.0) -> RedisStore:
    options = RedisOptions(
        addresses=tuple(server.address for server in servers),
        is_cluster=len(servers) > 1,
        timeout_seconds=timeout_seconds,
    )
    return RedisStore(options, VolatileOptions(num_partitions=NUM_PARTITIONS))


def levels_over(redis: RowStore, disk: RowStore) -> RowLevels:
    names = ["redis", "disk"]
    return RowLevels([redis, disk], [TABLE], names=names, back_off_seconds=0.0, records=disk)


def write(levels: RowLevels, number: float) -> None:
    """Give even keys rows of a number; of odd ones only the first number is written, and deleted
    by the second."""
    if number == 1.0:
        levels.write(TABLE.name, KEYS, torch.full((len(KEYS), 2), 1.0))
        return
    levels.write(TABLE.name, KEYS[::2], torch.full((len(KEYS) // 2, 2), number))
    levels.delete(TABLE.name, KEYS[1::2])


def check(levels: RowLevels, number: float) -> None:
    """Check that all threads at once, each by a connection of its own, are answered the newest."""

    def read(_: int) -> tuple[list[bool], set[float]]:
        read = levels.read(TABLE.name, KEYS)
        rows = read.lines.view(torch.float32)[read.is_found]
        return read.is_found.tolist(), set(rows.flatten().tolist())

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for is_found, numbers in threads.map(read, range(3 * NUM_THREADS)):
            assert is_found == [True, False] * (len(KEYS) // 2)
            assert numbers == {number}


def is_used(levels: RowLevels) -> bool:
    levels.read(TABLE.name, KEYS)
    return not levels.statistics()[0].is_away


def saved(server: RedisServer) -> bytes:
    """What a Redis has on disk, once it has saved what it holds."""
    with server.client() as client:
        client.save()
    return (server.folder / "dump.rdb").read_bytes()


def restart_with(server: RedisServer, dump: bytes) -> None:
    """Kill a Redis, and start it with what it had on disk some time ago."""
    server.kill()
    (server.folder / "dump.rdb").write_bytes(dump)
    server.start()


@contextmanager
def process(redis: RedisStore, folder: Path) -> Iterator[tuple[RowLevels, RedisStore]]:
    """What a process has; Redis and the folder outlive it."""
    with redis, RocksDBStore(folder) as disk:
        yield levels_over(redis, disk), redis


def test_older_rows_are_not_answered(tmp_path: Path) -> None:
    with redis_server() as server:
        with redis_at(server) as elsewhere:
            # Not of the levels' tables: it stays.
            kept = elsewhere.table(OTHER.name, OTHER.line_bytes)
            kept.write(KEYS, torch.zeros(len(KEYS), OTHER.line_bytes, dtype=torch.uint8))
        with process(redis_at(server), tmp_path) as (levels, redis):
            write(levels, 1.0)
            dump = saved(server)
            write(levels, 2.0)
            check(levels, 2.0)
            table = redis.table(TABLE.name, TABLE.line_bytes)
            restart_with(server, dump)
            check(levels, 2.0)
            wait_until(lambda: is_used(levels) and table.num_rows() == len(KEYS) // 2)
            check(levels, 2.0)
        # The next process is told of nothing by the levels: Redis was there all the time.
        restart_with(server, dump)
        with process(redis_at(server), tmp_path) as (levels, redis):
            check(levels, 2.0)
            assert levels.statistics()[0].num_faults == 0
            table = redis.table(TABLE.name, TABLE.line_bytes)
            assert table.num_rows() == len(KEYS) // 2
            assert redis.table(OTHER.name, OTHER.line_bytes).num_rows() == len(KEYS)
        # Where it was not started anew, rows stay where they are.
        with process(redis_at(server), tmp_path) as (levels, _):
            check(levels, 2.0)
            assert levels.statistics()[0].num_hits == 3 * NUM_THREADS * len(KEYS) // 2


def test_a_node_of_a_cluster_with_older_rows_is_emptied_alone(tmp_path: Path) -> None:
    with redis_cluster() as servers:
        with process(redis_at(*servers), tmp_path) as (levels, _):
            write(levels, 1.0)
            dump = saved(servers[0])
            write(levels, 2.0)
            check(levels, 2.0)
            num_rows = [num_rows_of(server) for server in servers]
            assert all(num_rows) and sum(num_rows) == len(KEYS) // 2
        restart_with(servers[0], dump)
        wait_for_cluster(servers)
        assert num_rows_of(servers[0]) > num_rows[0]
        with process(redis_at(*servers), tmp_path) as (levels, _):
            read = levels.read(TABLE.name, KEYS)
            # Those of the others were there.
            assert levels.statistics()[0].num_hits == sum(num_rows[1:])
            assert read.lines.view(torch.float32)[read.is_found].unique().tolist() == [2.0]
            check(levels, 2.0)
            assert [num_rows_of(server) for server in servers] == num_rows


def num_rows_of(server: RedisServer) -> int:
    with server.client() as client:
        return sum(map(client.hlen, client.scan_iter("hps_et*v")))  # type: ignore[arg-type]


def test_rows_from_before_the_first_use_are_taken(tmp_path: Path) -> None:
    lines = torch.ones(len(KEYS), 2).view(torch.uint8)
    with redis_server() as server:
        with redis_at(server) as redis:
            redis.table(TABLE.name, TABLE.line_bytes).write(KEYS, lines)
        with process(redis_at(server), tmp_path) as (levels, _):
            assert levels.read(TABLE.name, KEYS).is_found.all()


def test_what_arrives_late_is_not_done(tmp_path: Path) -> None:
    with redis_server() as server, late_network(server.port) as network:
        options = RedisOptions(addresses=(network.address,), timeout_seconds=2.0)
        with process(RedisStore(options), tmp_path) as (levels, _):
            write(levels, 1.0)
            network.hold()
            write(levels, 2.0)
            assert levels.statistics()[0].num_faults == 1
            # By another connection it is there.
            wait_until(lambda: is_used(levels))
            write(levels, 3.0)
            network.deliver()
            check(levels, 3.0)
            assert levels.statistics()[0].num_hits


def test_what_a_mirror_needs(tmp_path: Path) -> None:
    with redis_server() as server, MemoryStore() as whole, MemoryStore() as other:
        options = RedisOptions(addresses=(server.address,), is_read_only=True)
        with (
            RedisStore(options) as redis,
            pytest.raises(ValueError, match="must be writable to mirror another store"),
        ):
            redis.mirror(whole, None)
        with redis_at(server) as redis:
            redis.mirror(whole, None)
            redis.mirror(whole, None)
            with pytest.raises(ValueError, match="must mirror one store, and has another one"):
                redis.mirror(other, None)
            with server.client() as client:
                client.execute_command("ACL SETUSER default -info")
            with pytest.raises(StoreAccessError, match=r"their rights: .*'info'"):
                redis.tables()
