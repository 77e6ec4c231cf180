"""Which rows leave partitions that overflow, under random histories."""

from collections.abc import Callable
from contextlib import ExitStack

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from tests.support.bounded_stores import BoundedStore
from tests.support.partition_keys import lines_of
from tests.support.redis_servers import RedisServer
from torchembed.core.key_partitions import partition_of
from torchembed.stores import (
    OverflowPolicy,
    RedisOptions,
    RedisStore,
    RowTable,
    VolatileMemoryStore,
    VolatileOptions,
)

NUM_PARTITIONS = 2
MAX_BATCH_ROWS = 5
LINE_BYTES = 9
KEYS = st.integers(0, 30)

Open = Callable[[VolatileOptions], BoundedStore]


class OverflowMachine(RuleBasedStateMachine):
    """Keeps the rank by which rows go beside a store: the time of their last use, or the number of
    their reads."""

    open_store: Open
    policy: OverflowPolicy

    def __init__(self) -> None:
        super().__init__()
        self.closing = ExitStack()
        self.ranks: list[dict[int, int]] = [{} for _ in range(NUM_PARTITIONS)]
        self.time = 0
        self.table: RowTable

    @initialize(margin=st.integers(1, 9), share=st.sampled_from([0.1, 0.29, 0.5, 0.8, 0.99]))
    def open(self, margin: int, share: float) -> None:
        self.margin, self.num_left = margin, margin * round(share * 100) // 100
        options = VolatileOptions(
            num_partitions=NUM_PARTITIONS,
            overflow_margin_rows=margin,
            overflow_policy=self.policy,
            overflow_resolution_target=share,
            max_batch_rows=MAX_BATCH_ROWS,
        )
        self.store = self.closing.enter_context(self.open_store(options))
        self.table = self.store.table("t", LINE_BYTES)

    @rule(keys=st.lists(KEYS, min_size=1, max_size=MAX_BATCH_ROWS))
    def write(self, keys: list[int]) -> None:
        tensor = torch.tensor(keys)
        self.table.write(tensor, lines_of(tensor, LINE_BYTES).contiguous())
        self.time += 1
        for key, partition in self.placed(keys):
            if self.policy is OverflowPolicy.EVICT_OLDEST:
                self.ranks[partition][key] = self.time
            else:
                self.ranks[partition].setdefault(key, 0)
        is_kept = set(self.kept())
        for ranks in self.ranks:
            stayed = {key: rank for key, rank in ranks.items() if key in is_kept}
            gone = {key: rank for key, rank in ranks.items() if key not in is_kept}
            overflows = len(ranks) > self.margin
            assert len(stayed) == (self.num_left if overflows else len(ranks))
            if stayed and gone and self.policy is not OverflowPolicy.EVICT_RANDOM:
                assert max(gone.values()) <= min(stayed.values())
            for key in gone:
                del ranks[key]

    @rule(keys=st.lists(KEYS, max_size=12))
    def read(self, keys: list[int]) -> None:
        lines = torch.empty(len(keys), LINE_BYTES, dtype=torch.uint8)
        found = self.table.read(torch.tensor(keys, dtype=torch.int64), lines)
        placed = list(self.placed(keys))
        assert found.tolist() == [key in self.ranks[partition] for key, partition in placed]
        self.time += 1
        for key, partition in placed:
            ranks = self.ranks[partition]
            if key in ranks:
                by_time = self.policy is OverflowPolicy.EVICT_OLDEST
                ranks[key] = self.time if by_time else ranks[key] + 1
        self.store.sync()

    @rule(keys=st.lists(KEYS, max_size=4))
    def delete(self, keys: list[int]) -> None:
        self.table.delete(torch.tensor(keys, dtype=torch.int64))
        for key, partition in self.placed(keys):
            self.ranks[partition].pop(key, None)
        assert self.kept() == sorted(key for ranks in self.ranks for key in ranks)

    def placed(self, keys: list[int]) -> list[tuple[int, int]]:
        """Each of ``keys`` with its partition."""
        tensor = torch.tensor(keys, dtype=torch.int64)
        return list(zip(keys, partition_of(tensor, NUM_PARTITIONS).tolist(), strict=True))

    def kept(self) -> list[int]:
        keys = []
        for chunk in self.table.chunks(7):
            assert torch.equal(chunk.lines, lines_of(chunk.keys, LINE_BYTES))
            keys += chunk.keys.tolist()
        return keys

    def teardown(self) -> None:
        self.closing.close()


@pytest.mark.parametrize("policy", OverflowPolicy)
def test_memory(policy: OverflowPolicy) -> None:
    run(policy, VolatileMemoryStore, num_examples=40)


@pytest.mark.parametrize("policy", OverflowPolicy)
def test_redis(single_redis: RedisServer, policy: OverflowPolicy) -> None:
    def open_store(options: VolatileOptions) -> RedisStore:
        with single_redis.client() as client:
            client.flushall()
        return RedisStore(RedisOptions(addresses=(single_redis.address,)), options)

    run(policy, open_store, num_examples=20)


def run(policy: OverflowPolicy, open_store: Open, num_examples: int) -> None:
    machine = type(
        "Machine", (OverflowMachine,), {"policy": policy, "open_store": staticmethod(open_store)}
    )
    settings = hypothesis.settings(max_examples=num_examples, stateful_step_count=25)
    run_state_machine_as_test(machine, settings=settings)
