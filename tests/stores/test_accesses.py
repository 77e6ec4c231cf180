"""Reads are noted behind the readers: when, how often, and what is lost."""

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch

from tests.support.bounded_stores import BoundedStore
from tests.support.partition_keys import lines_of
from tests.support.redis_servers import RedisServer
from tests.support.waiting import wait_until
from torchembed.stores import (
    OverflowPolicy,
    RedisLayout,
    RedisOptions,
    RedisStore,
    StoreUnavailableError,
    VolatileOptions,
)
from torchembed.stores.redis.layout import partition_names
from torchembed.stores.volatile import access_refresher
from torchembed.stores.volatile.access_refresher import AccessRefresher

LINE_BYTES = 16
Open = Callable[[VolatileOptions], BoundedStore]


class Table:
    """Notes reads when it is let to."""

    def __init__(self) -> None:
        self.may_note = threading.Event()
        self.noted: list[list[int]] = []
        self.error: Exception | None = None

    def note_reads(self, reads: list[int]) -> None:
        assert self.may_note.wait(60)
        if self.error is not None:
            raise self.error
        self.noted.append(reads)


def test_readers_do_not_wait_and_all_that_waits_is_noted_at_once() -> None:
    table, refresher = Table(), AccessRefresher[int]("test")
    refresher.add(table, 1, 1)
    waiting = refresher._waiting
    wait_until(lambda: waiting.is_noting)
    for read in (2, 3, 4):
        refresher.add(table, read, 1)
    table.may_note.set()
    refresher.flush()
    assert table.noted == [[1], [2, 3, 4]]
    refresher.close()
    refresher.add(table, 5, 7)
    refresher.close()
    assert table.noted == [[1], [2, 3, 4]]
    assert refresher.num_lost_keys == 7


def test_what_waits_is_noted_on_closing() -> None:
    table, refresher = Table(), AccessRefresher[int]("test")
    table.may_note.set()
    for read in range(100):
        refresher.add(table, read, 1)
    refresher.close()
    assert [read for reads in table.noted for read in reads] == list(range(100))


def test_no_more_keys_wait_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_refresher, "MAX_WAITING_KEYS", 10)
    table, refresher = Table(), AccessRefresher[int]("test")
    refresher.add(table, 0, 10)
    wait_until(lambda: refresher._waiting.is_noting)
    for read in (1, 2, 3):
        refresher.add(table, read, 4)
    table.may_note.set()
    refresher.close()
    assert table.noted == [[0], [1, 2]]
    assert refresher.num_lost_keys == 4


def test_failures_are_raised_later_but_for_stores_that_are_away() -> None:
    table, refresher = Table(), AccessRefresher[int]("test")
    table.may_note.set()
    table.error = StoreUnavailableError("it does not answer")
    refresher.add(table, 0, 3)
    refresher.flush()
    assert refresher.num_lost_keys == 3
    table.error = ZeroDivisionError("a mistake")
    refresher.add(table, 0, 2)
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        refresher.flush()
    table.error = None
    refresher.add(table, 7, 1)
    refresher.close()
    assert table.noted == [[7]]
    assert refresher.num_lost_keys == 5


def test_the_thread_ends_with_its_refresher() -> None:
    table, refresher = Table(), AccessRefresher[int]("test")
    table.may_note.set()
    refresher.add(table, 0, 1)
    refresher.flush()
    thread, kept = refresher._thread, weakref.ref(table)
    assert thread is not None
    del refresher, table
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    assert kept() is None


@pytest.mark.parametrize("policy", OverflowPolicy)
def test_closing_notes_what_was_read_in_redis(
    single_redis: RedisServer, policy: OverflowPolicy
) -> None:
    options = VolatileOptions(num_partitions=1, overflow_policy=policy)
    names = partition_names(RedisLayout.TORCHEMBED, "t", 0)
    keys = torch.arange(3)
    with single_redis.client() as client:
        with RedisStore(RedisOptions(addresses=(single_redis.address,)), options) as store:
            table = store.table("t", LINE_BYTES)
            table.write(keys, lines_of(keys, LINE_BYTES).contiguous())
            before = accesses_of(client, names.accesses)
            for _ in range(5):
                read = torch.tensor([1, 1, 2, 99])
                table.read(read, torch.empty(4, LINE_BYTES, dtype=torch.uint8))
        after = accesses_of(client, names.accesses)
    if policy is OverflowPolicy.EVICT_LEAST_USED:
        assert before == {0: 0, 1: 0, 2: 0}
        assert after == {0: 0, 1: 10, 2: 5}
    elif policy is OverflowPolicy.EVICT_OLDEST:
        assert after[0] == before[0] == before[1]
        assert after[1] == after[2] > before[1]
    else:
        assert before == after == {}


def accesses_of(client, name: bytes) -> dict[int, int]:  # type: ignore[no-untyped-def]
    found = client.hgetall(name)
    return {int.from_bytes(key, "little"): int(access) for key, access in found.items()}


@pytest.mark.parametrize("policy", OverflowPolicy)
def test_many_threads_in_partitions_that_overflow(
    open_bounded: Open, policy: OverflowPolicy
) -> None:
    """Lines are whole and their keys' own, whatever is evicted meanwhile, and in the end no
    partition has more than it may."""
    options = VolatileOptions(
        num_partitions=2, overflow_margin_rows=50, overflow_policy=policy, max_batch_rows=16
    )
    store = open_bounded(options)
    failures: list[BaseException] = []

    def use(seed: int) -> None:
        table = store.table("t", LINE_BYTES)
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(20):
                keys = torch.randint(300, (40,), generator=generator)
                table.write(keys, lines_of(keys, LINE_BYTES).contiguous())
                keys = torch.randint(300, (60,), generator=generator)
                lines = torch.empty(60, LINE_BYTES, dtype=torch.uint8)
                found = table.read(keys, lines)
                assert torch.equal(lines[found], lines_of(keys, LINE_BYTES)[found])
                table.delete(keys[:5])
                for chunk in table.chunks(30):
                    assert torch.equal(chunk.lines, lines_of(chunk.keys, LINE_BYTES))
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    store.sync()
    assert store.num_lost_accesses == 0
    table = store.table("t", LINE_BYTES)
    assert 0 < table.num_rows() <= 100
    assert sum(len(chunk.keys) for chunk in table.chunks(7)) == table.num_rows()
