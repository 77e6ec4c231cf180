"""Tables in Redis that HugeCTR's parameter server has written, as its source lays them out."""

from collections.abc import Iterator

import numpy as np
import pytest
import redis
import torch

from tests.support.redis_servers import RedisServer
from torchembed.stores import (
    CorruptStoreError,
    RedisLayout,
    RedisOptions,
    RedisStore,
    RowStoreError,
    VolatileOptions,
)

# By the function that HugeCTR divides keys by.
PARTITIONS = {0: 0, 1: 3}
NUM_PARTITIONS = 8


def partition(key: int) -> int:
    def ror(x: int, n: int) -> int:
        return (x >> n | x << (64 - n)) % 2**64

    x = key % 2**64
    x ^= ror(x, 25) ^ ror(x, 50)
    x = x * 0xA24BAED4963EE407 % 2**64
    x ^= ror(x, 24) ^ ror(x, 49)
    x = x * 0x9FB21C651E98DF25 % 2**64
    return (x ^ x >> 28) % NUM_PARTITIONS


def write(client: redis.Redis, model: str, table: str, keys: list[int], dim: int) -> None:
    """What HugeCTR writes: a hash for each partition's rows, and one for when they were used."""
    for key in keys:
        stem = f"hps_et{{hps_et.{model}.{table}/p{partition(key)}}}"
        field = key.to_bytes(8, "little", signed=True)
        client.hset(f"{stem}v", field, np.full(dim, key, dtype="<f4").tobytes())
        client.hset(f"{stem}t", field, (1_700_000_000).to_bytes(8, "little"))


KEYS = [-(2**63), -7, 0, 1, 2, 3, 2**40, 2**63 - 1, *range(100, 200)]


@pytest.fixture
def client(single_redis: RedisServer) -> Iterator[redis.Redis]:
    with single_redis.client() as client:
        yield client


def options_of(server: RedisServer) -> RedisOptions:
    return RedisOptions(addresses=(server.address,), layout=RedisLayout.HUGECTR, is_read_only=True)


def test_the_partitions_are_those_of_the_function() -> None:
    assert {key: partition(key) for key in PARTITIONS} == PARTITIONS


def test_rows_are_read(single_redis: RedisServer, client: redis.Redis) -> None:
    write(client, "wdl", "wide", KEYS, 1)
    write(client, "wdl", "deep.part", KEYS[:3], 16)
    before = {name: client.dump(name) for name in client.scan_iter()}
    with RedisStore(options_of(single_redis)) as store:
        assert store.tables() == {"wdl/deep.part": 64, "wdl/wide": 4}
        table = store.table("wdl/wide", 4)
        assert table.num_rows() == len(KEYS)
        keys = torch.tensor([5, *KEYS])
        lines = torch.zeros(len(keys), 4, dtype=torch.uint8)
        assert table.read(keys, lines).tolist() == [False] + [True] * len(KEYS)
        assert torch.equal(lines.view(torch.float32)[1:, 0], keys[1:].float())
        assert [key for c in table.chunks(10) for key in c.keys.tolist()] == sorted(KEYS)
        with store.snapshot() as snapshot:
            assert snapshot.table("wdl/wide", 4).num_rows() == len(KEYS)
        for change in (lambda: table.write(keys, lines), lambda: table.delete(keys)):
            with pytest.raises(RowStoreError, match="is read-only"):
                change()
    assert {name: client.dump(name) for name in client.scan_iter()} == before


def test_rows_of_another_width(single_redis: RedisServer, client: redis.Redis) -> None:
    write(client, "m", "t", KEYS, 4)
    with RedisStore(options_of(single_redis)) as store:
        table = store.table("m/t", 8)
        with pytest.raises(CorruptStoreError, match="must have 8 bytes, and some have 16"):
            table.read(torch.tensor(KEYS), torch.empty(len(KEYS), 8, dtype=torch.uint8))


def test_fewer_partitions_than_were_written(single_redis: RedisServer, client: redis.Redis) -> None:
    write(client, "m", "t", KEYS, 4)
    with (
        RedisStore(options_of(single_redis), VolatileOptions(num_partitions=4)) as store,
        pytest.raises(ValueError, match=r"num_partitions of table 'm/t' in .* must be more than 4"),
    ):
        store.table("m/t", 16)


def test_a_table_that_is_not_there_has_no_rows(single_redis: RedisServer) -> None:
    with RedisStore(options_of(single_redis)) as store:
        assert store.tables() == {}
        assert store.table("m/t", 16).num_rows() == 0
