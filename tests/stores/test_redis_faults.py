"""What a Redis that is away, full, or holds something else does to a store."""

import json
import threading
import time
from collections.abc import Callable

import pytest
import torch

from tests.support.partition_keys import lines_of
from tests.support.redis_servers import RedisServer, redis_cluster, redis_server, reserved_port
from tests.support.waiting import wait_until
from torchembed.stores import (
    CorruptStoreError,
    OverflowPolicy,
    RedisOptions,
    RedisStore,
    RowStoreError,
    RowTable,
    StoreFullError,
    StoreUnavailableError,
    VolatileOptions,
)

LINE_BYTES = 24
KEYS = torch.arange(100)
LINES = lines_of(KEYS, LINE_BYTES).contiguous()
TIMEOUT_SECONDS = 0.5
BOUND_SECONDS = 60.0
"""The timeout, and what a busy machine takes beside it."""

COUNTED = VolatileOptions(num_partitions=4, overflow_policy=OverflowPolicy.EVICT_LEAST_USED)


def store_at(
    *addresses: str, options: VolatileOptions = COUNTED, timeout_seconds: float = BOUND_SECONDS / 2
) -> RedisStore:
    is_cluster = len(addresses) > 1
    return RedisStore(
        RedisOptions(addresses=addresses, is_cluster=is_cluster, timeout_seconds=timeout_seconds),
        options,
    )


def read(table: RowTable) -> int:
    """How many rows are there; each must be whole."""
    lines = torch.empty_like(LINES)
    found = table.read(KEYS, lines)
    assert torch.equal(lines[found], LINES[found])
    return int(found.sum())


def fails_in_time(use: Callable[[], object]) -> None:
    begin = time.monotonic()
    with pytest.raises(StoreUnavailableError, match=r"the Redis at 127\.0\.0\.1.* does not answer"):
        use()
    assert time.monotonic() - begin < BOUND_SECONDS


def test_a_server_that_is_not_there_yet() -> None:
    with redis_server() as server:
        server.kill()
        with store_at(server.address) as store:
            fails_in_time(lambda: store.table("t", LINE_BYTES))
            fails_in_time(store.tables)
            fails_in_time(store.snapshot)
            server.start()
            store.table("t", LINE_BYTES).write(KEYS, LINES)
            assert read(store.table("t", LINE_BYTES)) == len(KEYS)


def test_a_server_is_killed_amid_traffic_and_comes_back() -> None:
    """Each of eight threads is told in time, and goes on with the same table."""
    with redis_server() as server, store_at(server.address) as store:
        table = store.table("t", LINE_BYTES)
        num_failed, num_recovered, surprises = [0] * 8, [0] * 8, []
        is_back, done = threading.Event(), threading.Event()

        def use(n: int) -> None:
            while not done.is_set():
                begin = time.monotonic()
                try:
                    table.write(KEYS, LINES)
                    read(table)
                    num_recovered[n] += is_back.is_set()
                except StoreUnavailableError:
                    num_failed[n] += 1
                except BaseException as error:  # noqa: BLE001 - all are shown
                    surprises.append(error)
                if time.monotonic() - begin > BOUND_SECONDS:
                    surprises.append(TimeoutError("a call took too long"))

        threads = [threading.Thread(target=use, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        wait_until(lambda: table.num_rows() == len(KEYS))
        server.kill()
        wait_until(lambda: all(num_failed))
        server.start()
        is_back.set()
        wait_until(lambda: all(num_recovered))
        done.set()
        for thread in threads:
            thread.join()
        assert surprises == []
        # It came back empty, and was told again what tables there are.
        assert store.tables() == {"t": LINE_BYTES}
        assert read(table) == len(KEYS)
        store.sync()


def test_a_server_that_hangs(single_redis: RedisServer) -> None:
    with store_at(single_redis.address) as store:
        store.table("t", LINE_BYTES).write(KEYS, LINES)
    with store_at(single_redis.address, timeout_seconds=TIMEOUT_SECONDS) as store:
        tables = list[RowTable]()
        # On a busy machine a server that does not hang may answer late, too.
        wait_until(lambda: works(lambda: tables.append(store.table("t", LINE_BYTES))))
        (table,) = tables
        with single_redis.stopped():
            fails_in_time(lambda: read(table))
            fails_in_time(lambda: table.write(KEYS, LINES))
        wait_until(lambda: works(lambda: read(table)))
    with store_at(single_redis.address) as store:
        assert read(store.table("t", LINE_BYTES)) == len(KEYS)


def test_reads_that_could_not_be_noted_are_counted(single_redis: RedisServer) -> None:
    with store_at(single_redis.address) as store:
        table = store.table("t", LINE_BYTES)
        table.write(KEYS, LINES)
        # Noting is one script; this makes it fail while lines can be read.
        with single_redis.client() as client:
            client.execute_command("ACL SETUSER default -eval")
            assert read(table) == len(KEYS)
            store.sync()
            assert store.num_lost_accesses == len(KEYS)
            client.execute_command("ACL SETUSER default +eval")
        read(table)
        store.sync()
        assert store.num_lost_accesses == len(KEYS)


def test_a_node_of_a_cluster_is_lost_and_comes_back() -> None:
    with redis_cluster() as servers, store_at(*(s.address for s in servers)) as store:
        tables = [store.table(f"t{n}", LINE_BYTES) for n in range(8)]
        for table in tables:
            table.write(KEYS, LINES)
        servers[0].kill()
        # 32 partitions are on all three nodes.
        fails_in_time(lambda: [read(table) for table in tables])
        servers[0].start()
        wait_until(lambda: works(lambda: [table.write(KEYS, LINES) for table in tables]))
        assert [read(table) for table in tables] == [len(KEYS)] * 8


def works(use: Callable[[], object]) -> bool:
    try:
        use()
    except StoreUnavailableError:
        return False
    return True


def test_a_server_that_is_full_is_read(single_redis: RedisServer) -> None:
    with store_at(single_redis.address) as store, single_redis.client() as client:
        table = store.table("t", LINE_BYTES)
        table.write(KEYS, LINES)
        more = KEYS + 1000
        client.config_set("maxmemory", 1)
        try:
            for write in (
                lambda: table.write(more, lines_of(more, LINE_BYTES).contiguous()),
                lambda: store.table("another", LINE_BYTES),
            ):
                with pytest.raises(StoreFullError, match=r"is full: .*'maxmemory'.* Raise its"):
                    write()
            assert read(table) == len(KEYS)
            assert table.num_rows() == len(KEYS)
            with store_at(single_redis.address) as other:
                assert read(other.table("t", LINE_BYTES)) == len(KEYS)
            table.delete(KEYS[:10])
            assert read(table) == len(KEYS) - 10
        finally:
            client.config_set("maxmemory", 0)
        table.write(more, lines_of(more, LINE_BYTES).contiguous())
        assert table.num_rows() == 2 * len(KEYS) - 10


def test_lines_of_another_width_in_redis(single_redis: RedisServer) -> None:
    with store_at(single_redis.address) as store, single_redis.client() as client:
        table = store.table("t", LINE_BYTES)
        table.write(KEYS, LINES)
        for name in client.scan_iter("*v"):
            client.hset(name, (7).to_bytes(8, "little"), b"short")
        read_seven = KEYS[7:8], torch.empty(1, LINE_BYTES, dtype=torch.uint8)
        with pytest.raises(CorruptStoreError, match="must have 24 bytes, and some have 5; delete"):
            table.read(*read_seven)
        table.delete(KEYS[7:8])
        assert read(table) == len(KEYS) - 1


def test_other_things_under_the_names_of_a_table(single_redis: RedisServer) -> None:
    with store_at(single_redis.address) as store, single_redis.client() as client:
        table = store.table("t", LINE_BYTES)
        table.write(KEYS, LINES)
        names = sorted(client.scan_iter("*v"))
        client.hset(names[0], "abc", b"x" * LINE_BYTES)
        with pytest.raises(CorruptStoreError, match=r"must have 8 bytes, and some have 3; give"):
            table.chunks(10)
        client.delete(names[1])
        client.set(names[1], "a string")
        with pytest.raises(RowStoreError, match="refuses a command: WRONGTYPE"):
            read(table)


@pytest.mark.parametrize("record", [b"[]", b'{"line_bytes": 24}', b"no json"])
def test_records_of_others(single_redis: RedisServer, record: bytes) -> None:
    with store_at(single_redis.address) as store, single_redis.client() as client:
        client.hset("torchembed_tables", "t", record)
        for use in (store.tables, lambda: store.table("t", LINE_BYTES)):
            with pytest.raises(CorruptStoreError, match="_tables' of Redis has a record"):
                use()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            VolatileOptions(num_partitions=5, overflow_policy=OverflowPolicy.EVICT_LEAST_USED),
            "num_partitions of table 't' must be 4, with which it was made in the store in Redis",
        ),
        (
            VolatileOptions(num_partitions=4),
            "overflow_policy of table 't' must be evict_least",
        ),
    ],
)
def test_options_that_others_have_set_otherwise(
    single_redis: RedisServer, options: VolatileOptions, message: str
) -> None:
    with store_at(single_redis.address) as store:
        store.table("t", LINE_BYTES)
    with (
        store_at(single_redis.address, options=options) as other,
        pytest.raises(ValueError, match=message),
    ):
        other.table("t", LINE_BYTES)


def test_a_store_without_a_server_is_made_and_closed() -> None:
    with reserved_port() as port, store_at(f"127.0.0.1:{port}") as store:
        assert "127.0.0.1" in str(store)


def test_a_store_that_is_only_read(single_redis: RedisServer) -> None:
    with store_at(single_redis.address) as store:
        store.table("t", LINE_BYTES).write(KEYS, LINES)
    with single_redis.client() as client:
        before = {name: client.hgetall(name) for name in client.scan_iter("hps_et*")}
        address = RedisOptions(addresses=(single_redis.address,), is_read_only=True)
        with RedisStore(address, COUNTED) as reading:
            table = reading.table("t", LINE_BYTES)
            assert read(table) == len(KEYS)
            for write in (lambda: table.write(KEYS, LINES), lambda: table.delete(KEYS)):
                with pytest.raises(RowStoreError, match="is read-only; open it with is_read_only="):
                    write()
            with pytest.raises(RowStoreError, match="is read-only and has no table 'new'; write"):
                reading.table("new", LINE_BYTES)
        assert before == {name: client.hgetall(name) for name in client.scan_iter("hps_et*")}
        assert json.loads(client.hget("torchembed_tables", "t"))["line_bytes"] == LINE_BYTES
