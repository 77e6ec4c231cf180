"""Processes that share a Redis: overflows are resolved once, and nothing is ever torn."""

import pytest
import torch

from tests.support.partition_keys import keys_of, lines_of
from tests.support.redis_processes import (
    LINE_BYTES,
    MARGIN,
    NUM_KEYS,
    NUM_LEFT,
    NUM_PARTITIONS,
    options,
    overflow_again_and_again,
    write_versions_until_killed,
)
from tests.support.redis_servers import RedisServer
from tests.support.store_processes import start
from torchembed.stores import (
    OverflowPolicy,
    RedisLayout,
    RedisOptions,
    RedisStore,
    VolatileOptions,
)
from torchembed.stores.redis.layout import partition_names
from torchembed.stores.redis.nodes import RedisNodes
from torchembed.stores.redis.overflow import OverflowResolver

RANKED = [OverflowPolicy.EVICT_OLDEST, OverflowPolicy.EVICT_LEAST_USED]
NAMES = partition_names(RedisLayout.TORCHEMBED, "t", 0)


def address_of(server: RedisServer) -> RedisOptions:
    return RedisOptions(addresses=(server.address,))


def unbounded(policy: OverflowPolicy) -> VolatileOptions:
    return VolatileOptions(num_partitions=NUM_PARTITIONS, overflow_policy=policy)


@pytest.mark.parametrize("policy", OverflowPolicy)
def test_whoever_comes_late_to_an_overflow_evicts_nothing(
    single_redis: RedisServer, policy: OverflowPolicy
) -> None:
    keys = keys_of(0, MARGIN + 10, NUM_PARTITIONS)
    resolvers = [
        OverflowResolver(RedisNodes(address_of(single_redis)), options(policy)) for _ in range(2)
    ]
    with RedisStore(address_of(single_redis), unbounded(policy)) as store:
        table = store.table("t", LINE_BYTES)
        table.write(keys, lines_of(keys, LINE_BYTES).contiguous())
        resolvers[0].resolve(NAMES, b"0", NUM_LEFT)
        assert table.num_rows() == NUM_LEFT
        table.write(keys[:20], lines_of(keys[:20], LINE_BYTES).contiguous())
        num_rows = table.num_rows()
        assert NUM_LEFT <= num_rows <= NUM_LEFT + 20
        resolvers[1].resolve(NAMES, b"0", NUM_LEFT)
        assert table.num_rows() == num_rows


class _DeletesMeanwhile(OverflowResolver):
    """Has rows deleted after it has chosen which ones go, and others read."""

    def __init__(self, server: RedisServer, policy: OverflowPolicy) -> None:
        super().__init__(RedisNodes(address_of(server)), options(policy))
        self._store = RedisStore(address_of(server), unbounded(policy))
        self.keys = torch.empty(0, dtype=torch.int64)
        self.is_read = False

    def _candidates(self, names):  # type: ignore[no-untyped-def]
        found = super()._candidates(names)
        table = self._store.table("t", LINE_BYTES)
        if self.is_read:
            table.read(self.keys, torch.empty(len(self.keys), LINE_BYTES, dtype=torch.uint8))
            self._store.sync()
        else:
            table.delete(self.keys)
        self.keys = self.keys[:0]
        return found


@pytest.mark.parametrize("policy", RANKED)
@pytest.mark.parametrize("is_read", [False, True])
def test_rows_that_others_take_or_use_meanwhile_count(
    single_redis: RedisServer, policy: OverflowPolicy, is_read: bool
) -> None:
    """Of 310 rows 160 are to go. Where 40 others are deleted once those were chosen, 120 go; where
    40 of them are read, 40 others go."""
    keys = keys_of(0, MARGIN + 10, NUM_PARTITIONS)
    resolver = _DeletesMeanwhile(single_redis, policy)
    resolver.is_read = is_read
    with RedisStore(address_of(single_redis), unbounded(policy)) as store:
        table = store.table("t", LINE_BYTES)
        for some in keys.split(10):
            table.write(some, lines_of(some, LINE_BYTES).contiguous())
        warm = keys[160:]
        table.read(warm, torch.empty(len(warm), LINE_BYTES, dtype=torch.uint8))
        store.sync()
        resolver.keys = keys[:40] if is_read else warm[:40]
        resolver.resolve(NAMES, b"0", NUM_LEFT)
        kept = {key for chunk in table.chunks(1000) for key in chunk.keys.tolist()}
        assert len(kept) == NUM_LEFT
        if is_read:
            assert not set(keys[40:160].tolist()) & kept
        else:
            assert set(warm[40:].tolist()) <= kept


@pytest.mark.parametrize("policy", OverflowPolicy)
def test_many_processes_evict_at_once(single_redis: RedisServer, policy: OverflowPolicy) -> None:
    """As long as they write and evict, no overflow leaves fewer rows than it may, and each row has
    its access."""
    processes = [
        start(overflow_again_and_again, single_redis.address, policy, seed) for seed in range(3)
    ]
    for process in processes:
        process.next_message()
    num_accesses = -1
    with single_redis.client() as client:
        while int(client.get(NAMES.generation) or 0) < 2:
            pass
        num_seen, smallest, largest = 0, MARGIN, 0
        while num_seen < 500 or int(client.get(NAMES.generation) or 0) < 30:
            with client.pipeline(transaction=True) as pipeline:
                pipeline.hlen(NAMES.values).hlen(NAMES.accesses)
                num_rows, num_accesses = pipeline.execute()
            if policy in RANKED:
                assert num_rows == num_accesses
            smallest, largest = min(smallest, num_rows), max(largest, num_rows)
            num_seen += 1
        assert smallest >= NUM_LEFT
        # Each of three processes may have written a batch before one of them evicts.
        assert largest <= MARGIN + 3 * 64
        for process in processes:
            process.messages.send("end")
        assert all(process.next_message() > 0 for process in processes)
        assert NUM_LEFT <= client.hlen(NAMES.values) <= MARGIN
        assert num_accesses == (0 if policy not in RANKED else num_rows)


def test_a_process_that_is_killed_leaves_whole_parts(single_redis: RedisServer) -> None:
    """Each partition's part of a batch is there or not, with its accesses; batches of 64 rows."""
    keys = torch.arange(NUM_KEYS)
    with RedisStore(address_of(single_redis), options(OverflowPolicy.EVICT_OLDEST)) as store:
        table = store.table("t", LINE_BYTES)
        lines = torch.empty(NUM_KEYS, LINE_BYTES, dtype=torch.uint8)
        for first in (1, 101, 201):
            process = start(write_versions_until_killed, single_redis.address, first)
            while process.next_message() < first + 5:
                pass
            process.kill()
            assert table.read(keys, lines).all()
            for batch in (slice(0, 64), slice(64, NUM_KEYS)):
                for partition in range(NUM_PARTITIONS):
                    of_one = torch.isin(keys[batch], keys_of(partition, NUM_KEYS, NUM_PARTITIONS))
                    assert lines[batch][of_one].unique().numel() == 1
            with single_redis.client() as client:
                for partition in range(NUM_PARTITIONS):
                    names = partition_names(RedisLayout.TORCHEMBED, "t", partition)
                    fields = set(client.hkeys(names.values))
                    assert fields == set(client.hkeys(names.accesses))
                    assert len(fields) > 0
