"""Updates from brokers into lookups: the rows end up as they were published, and all is counted."""

import logging
import random
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import confluent_kafka
import pytest
import torch
from torch import Tensor

from tests.support.followed_models import FollowedModels, followed_models
from tests.support.kafka_brokers import Brokers, running_brokers
from tests.support.waiting import wait_until
from torchembed.serving.protocols import MetricTotal
from torchembed.serving.server.metrics import update_totals
from torchembed.serving.updates import (
    ApplierOptions,
    DropReason,
    TableUpdates,
    UpdateApplier,
    UpdatedModels,
)
from torchembed.stores import StoreUnavailableError
from torchembed.streams import (
    MessageFault,
    SourceOptions,
    UpdatePublisher,
    UpdateSource,
    dense_tensors,
)
from torchembed.streams.hugectr_messages import encode_pairs
from torchembed.streams.messages import Message, MessageKind, encode

LIMIT_SECONDS = 120.0
QUICK = SourceOptions(discovery_seconds=0.1, session_timeout_seconds=1.0, max_messages=7)
"""The next instance of a group has its partitions a second after the one before has ended."""
ALONE = SourceOptions(discovery_seconds=0.1, max_messages=7)
"""Of a group's one instance, which stays in it also while brokers are away for a while."""
OPTIONS = ApplierOptions(poll_timeout_seconds=0.05, longest_back_off_seconds=0.05)


@pytest.fixture
def brokers() -> Iterator[Brokers]:
    with running_brokers() as brokers:
        yield brokers


def applier_of(
    brokers: Brokers, models: UpdatedModels, group: str = "g", options: SourceOptions = QUICK
) -> UpdateApplier:
    return UpdateApplier(UpdateSource(brokers.addresses, group, options), models, OPTIONS)


def wait_for_messages(applier: UpdateApplier, num_messages: int) -> None:
    """Return once that many have come in all, and what they hold was applied or dropped."""

    def are_done() -> bool:
        received, applied = applier.source.statistics, applier.statistics()
        assert applied.is_running
        num_dropped = received.num_dropped.total() + sum(applied.num_dropped.values())
        num_applied = applied.num_updates + applied.num_dense_parts
        num_handled = received.num_beacons + num_dropped + num_applied
        return num_handled == received.num_messages >= num_messages

    wait_until(are_done, lambda: (applier.source.statistics, applier.statistics()))


def wait_for_applied(applier: UpdateApplier, num_updates: int) -> None:
    """Return once that many updates were applied, of one message each; some may come again where a
    topic was found late."""

    def are_done() -> bool:
        applied = applier.statistics()
        return applied.num_updates + applied.num_dense_parts >= num_updates

    wait_until(are_done, lambda: (applier.source.statistics, applier.statistics()))


def same_rows(found: Mapping[int, Tensor], expected: Mapping[int, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(row, expected[id_]) for id_, row in found.items()
    )


def raw_rows(sequence: int, value: float, **fields: object) -> bytes:
    """A message of the row of key 1."""
    made: dict[str, object] = {
        "kind": MessageKind.ROWS,
        "model": "m",
        "table": "t",
        "version": 1,
        "publisher": 1,
        "published_at_micros": time.time_ns() // 1000,
        "keys": torch.tensor([1]),
        "rows": torch.full((1, 4), value),
    }
    return encode(Message(sequence=sequence, **(made | fields)))  # type: ignore[arg-type]


def send(brokers: Brokers, topic: str, *messages: bytes) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": brokers.addresses})
    for message in messages:
        producer.produce(topic, message, partition=0)
    assert not producer.flush(LIMIT_SECONDS)


def test_rows_end_up_as_they_were_published_in_stores_and_cache(brokers: Brokers) -> None:
    """By random changes of two tables in several partitions, of ids that were looked up before and
    are cached, or were missed; and by a dense part."""
    brokers.make_topic("torchembed.m.t", 3)
    brokers.make_topic("torchembed.m.u", 2)
    brokers.make_topic("torchembed-dense.m", 1)
    random_numbers = random.Random(0)
    expected: dict[str, dict[int, Tensor]] = {"t": {}, "u": {}}
    dims, ids = {"m/t": 4, "m/u": 8}, range(-60, 60)
    with (
        followed_models(dims) as models,
        UpdatePublisher(brokers.addresses) as publisher,
        applier_of(brokers, models) as applier,
    ):
        for version in range(1, 40):
            table = random_numbers.choice("tu")
            keys = torch.tensor(random_numbers.sample(ids, 20))
            rows, gone = torch.randn(14, dims[f"m/{table}"]), keys[14:]
            publisher.publish_rows("m", table, keys[:14], rows, version=version, deleted_keys=gone)
            expected[table] |= dict(zip(keys[:14].tolist(), rows, strict=True))
            for id_ in gone.tolist():
                expected[table].pop(id_, None)
            if version % 8 == 0:
                models.rows_of(f"m/{table}", ids)  # which brings them into the cache
        publisher.publish_dense("m", {"w": torch.arange(5.0)}, version=40)
        publisher.flush(LIMIT_SECONDS)
        wait_for_applied(applier, publisher.sequence)
        for table, rows_by_id in expected.items():
            for _ in range(2):
                assert same_rows(models.rows_of(f"m/{table}", ids), rows_by_id)
        found = applier.statistics()
    assert models.dense["m"][0] == 40
    assert torch.equal(models.dense["m"][1]["w"], torch.arange(5.0))
    assert found.num_rows == 39 * 14 and found.num_deletions == 39 * 6
    assert found.num_dense_parts == 1 and found.dense_versions == {"m": 40}
    assert found.num_dropped.keys() <= {DropReason.REPEATED} and found.num_retries == 0
    assert sum(of_table.num_rows for of_table in found.tables.values()) == found.num_rows
    assert max(of_table.version for of_table in found.tables.values()) == 39
    freshness = found.freshness["m"]
    assert sum(freshness.counts) == found.num_updates + 1
    assert len(freshness.counts) == len(freshness.upper_bounds) + 1
    assert 0 < freshness.sum_seconds < (found.num_updates + 1) * LIMIT_SECONDS


def test_a_row_that_is_cached_changes_in_the_cache(brokers: Brokers) -> None:
    """HugeCTR's cache was changed by nothing but a refresh."""
    keys = torch.tensor([5])
    with (
        followed_models({"m/t": 4}) as models,
        UpdatePublisher(brokers.addresses) as publisher,
        applier_of(brokers, models) as applier,
    ):
        models.apply_rows("m", "t", keys, torch.zeros(1, 4), version=0)
        models.rows_of("m/t", [5])
        before = models.lookup.statistics()
        publisher.publish_rows("m", "t", keys, torch.ones(1, 4), version=1)
        publisher.flush(LIMIT_SECONDS)
        wait_for_applied(applier, 1)
        assert same_rows(models.rows_of("m/t", [5]), {5: torch.ones(4)})
        after = models.lookup.statistics()
    assert after.num_requested_ids == before.num_requested_ids + 1
    assert after.num_missed_ids == before.num_missed_ids


def test_what_is_late_repeated_or_wrong_is_dropped_and_counted(
    brokers: Brokers, caplog: pytest.LogCaptureFixture
) -> None:
    for topic in ("torchembed.m.t", "torchembed.m.x", "torchembed.n.t", "torchembed-dense.m"):
        brokers.make_topic(topic, 1)
    whole = raw_rows(9, 9.0)
    send(
        brokers,
        "torchembed.m.t",
        raw_rows(2, 2.0, version=3),
        raw_rows(2, -1.0, version=3),  # repeated
        raw_rows(1, -1.0, version=3),  # late
        raw_rows(3, -1.0, version=2),  # of an earlier version
        raw_rows(4, 4.0, version=3),
        raw_rows(1, -1.0, version=2, publisher=2),
        raw_rows(1, 5.0, version=4, publisher=3),
        raw_rows(5, -1.0, version=4, rows=torch.full((1, 5), -1.0)),
        raw_rows(6, -1.0, version=4, rows=torch.full((1, 3), -1.0)),
        whole[:-1],
        whole + b"\0",
        b"XXXX" + whole[4:],
        whole[:8] + b"\7" + whole[9:],
        whole[:20] + b"\7" + whole[21:],
        raw_rows(9, 9.0, table="y"),
        raw_rows(9, 9.0, kind=MessageKind.DENSE, table="", piece=b"", num_parts=1),
        raw_rows(7, 6.0, version=4, publisher=3),
    )
    send(brokers, "torchembed.m.x", *(raw_rows(n, 1.0, table="x") for n in (1, 2)))
    send(brokers, "torchembed.n.t", *(raw_rows(n, 1.0, model="n") for n in (1, 2)))
    tensors = dense_tensors.to_bytes({"w": torch.ones(2)})
    others = dense_tensors.to_bytes({"v": torch.ones(2)})

    def dense(sequence: int, piece: bytes, **fields: int) -> bytes:
        of_part: dict[str, object] = {"kind": MessageKind.DENSE, "table": "", "piece": piece}
        return raw_rows(sequence, 0.0, **(of_part | {"all_parts_bytes": len(piece)} | fields))

    send(
        brokers,
        "torchembed-dense.m",
        dense(1, tensors, version=2),
        dense(2, others, version=3),
        dense(3, tensors, version=1),
        dense(4, tensors, version=3),
        dense(5, tensors, version=3, all_parts_bytes=2**40, num_parts=2**20),
        dense(6, tensors[:-1], version=4),
    )
    with (
        caplog.at_level(logging.WARNING, "torchembed.serving"),
        followed_models({"m/t": 4}) as models,
        applier_of(brokers, models) as applier,
    ):
        wait_for_messages(applier, 17 + 2 + 2 + 6)
        found, received = applier.statistics(), applier.source.statistics
        assert same_rows(models.rows_of("m/t", range(5)), {1: torch.full((4,), 6.0)})
    assert models.applied == {"m/t": [3, 3, 4, 4]}
    assert models.dense["m"][0] == 3
    assert found.num_dropped == {
        DropReason.REPEATED: 2,
        DropReason.OLD_VERSION: 2 + 1,
        DropReason.UNFIT: 2 + 2 + 1,
        DropReason.UNKNOWN: 2,
    }
    assert received.num_dropped == {
        MessageFault.TRUNCATED: 1,
        MessageFault.TRAILING: 1,
        MessageFault.MAGIC: 1,
        MessageFault.FORMAT: 1,
        MessageFault.CHECKSUM: 1,
        MessageFault.TOPIC: 2,
        MessageFault.TOO_LARGE: 1,
        MessageFault.CONTENTS: 1,
    }
    assert found.tables == {("m", "t"): TableUpdates(4, 0, 4)}
    # Of each table and reason the first.
    told = [record.getMessage() for record in caplog.records]
    assert len([line for line in told if "(unfit)" in line and "table t of model m" in line]) == 1
    assert len([line for line in told if "(unknown)" in line and "table t of model n" in line]) == 1
    assert len([line for line in told if "dropped an update" in line]) == 6


def test_hugectrs_messages_are_applied_in_the_order_of_their_partitions(brokers: Brokers) -> None:
    brokers.make_topic("hps_et.m.t", 1)
    brokers.make_topic("torchembed.m.t", 1)
    keys = torch.tensor([1, 2])
    with (
        followed_models({"m/t": 4}) as models,
        applier_of(brokers, models) as applier,
    ):
        send(brokers, "torchembed.m.t", raw_rows(1, 7.0, version=5))
        wait_for_messages(applier, 1)
        pairs = (encode_pairs(keys, torch.full((2, 4), float(n))) for n in range(20))
        send(brokers, "hps_et.m.t", b"HCTR\x08\0\0\0", *pairs)
        wait_for_messages(applier, 22)
        expected = {id_: torch.full((4,), 19.0) for id_ in (1, 2)}
        assert same_rows(models.rows_of("m/t", range(5)), expected)
        assert applier.statistics().num_dropped == {}
        assert applier.source.statistics.num_beacons == 1


class _AwayModels(FollowedModels):
    """Models whose stores are away while ``is_away``."""

    is_away = False
    error: Exception = StoreUnavailableError("the store is away")

    def apply_rows(self, model: str, table: str, keys: Tensor, rows: Tensor, **more: Any) -> None:
        if self.is_away:
            raise self.error
        super().apply_rows(model, table, keys, rows, **more)


@pytest.mark.parametrize("error", [_AwayModels.error, MemoryError("there is no room")])
def test_updates_wait_for_stores_that_are_away(
    brokers: Brokers, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "torchembed.serving"),
        followed_models({"m/t": 4}) as followed,
        UpdatePublisher(brokers.addresses) as publisher,
    ):
        models = _AwayModels(followed.lookup)
        models.is_away, models.error = True, error
        with applier_of(brokers, models) as applier:
            for version in range(1, 6):
                row = torch.full((1, 4), float(version))
                publisher.publish_rows("m", "t", torch.tensor([1]), row, version=version)
            publisher.flush(LIMIT_SECONDS)
            wait_until(lambda: applier.statistics().num_retries >= 3)
            assert applier.statistics().num_updates == 0
            models.is_away = False
            wait_for_applied(applier, 5)
        assert models.applied == {"m/t": [1, 2, 3, 4, 5]}
        models.is_away = True
        again = applier_of(brokers, models)
        again.start()
        row = torch.full((1, 4), 6.0)
        publisher.publish_rows("m", "t", torch.tensor([1]), row, version=6)
        publisher.flush(LIMIT_SECONDS)
        wait_until(lambda: again.statistics().num_retries > 0)
        # It ends while the store is away, and what it could not apply comes to the next one.
        began = time.monotonic()
        again.close()
        assert time.monotonic() - began < LIMIT_SECONDS
        models.is_away = False
        with applier_of(brokers, models) as third:
            wait_for_applied(third, 1)
        assert models.applied == {"m/t": [1, 2, 3, 4, 5, 6]}
    told = [record.getMessage() for record in caplog.records]
    assert sum("updates wait, and are tried again" in line for line in told) == 2
    assert sum("updates are applied again" in line for line in told) == 1


def test_updates_go_on_when_brokers_were_away(brokers: Brokers) -> None:
    brokers.make_topic("torchembed.m.t", 2)
    keys = torch.arange(40)
    with (
        followed_models({"m/t": 4}) as models,
        UpdatePublisher(brokers.addresses) as publisher,
        applier_of(brokers, models, options=ALONE) as applier,
    ):
        publisher.publish_rows("m", "t", keys, torch.zeros(40, 4), version=1)
        publisher.flush(LIMIT_SECONDS)
        wait_for_messages(applier, 2)
        for version in range(2, 4):
            brokers.go_away()
            rows = torch.full((40, 4), float(version))
            publisher.publish_rows("m", "t", keys, rows, version=version)
            num_errors = applier.source.statistics.num_broker_errors
            wait_until(lambda n=num_errors: applier.source.statistics.num_broker_errors > n)
            assert applier.statistics().is_running
            brokers.come_back()
            publisher.flush(LIMIT_SECONDS)
            rows_by_id = dict(zip(range(40), rows, strict=True))
            wait_until(lambda e=rows_by_id: same_rows(models.rows_of("m/t", range(50)), e))


def test_what_was_applied_is_committed(brokers: Brokers) -> None:
    with UpdatePublisher(brokers.addresses) as publisher, followed_models({"m/t": 4}) as models:
        for version in (1, 2):
            for sequence in range(5):
                row = torch.full((1, 4), float(sequence))
                publisher.publish_rows("m", "t", torch.tensor([1]), row, version=version)
            publisher.flush(LIMIT_SECONDS)
            with applier_of(brokers, models) as applier:
                wait_for_applied(applier, 5)
                assert applier.statistics().num_updates == 5
                wait_until(lambda a=applier: a.statistics().lag.num_messages == 0)
    assert set(models.applied["m/t"]) == {1, 2}
    assert models.applied["m/t"] == sorted(models.applied["m/t"])


class _FailingModels(FollowedModels):
    def swap_dense(self, model: str, tensors: Mapping[str, Tensor], version: int) -> None:
        raise AssertionError("a mistake of ours")


def test_a_thread_that_ends_by_itself_is_told(
    brokers: Brokers, caplog: pytest.LogCaptureFixture
) -> None:
    send(
        brokers,
        "torchembed-dense.m",
        raw_rows(
            1,
            0.0,
            kind=MessageKind.DENSE,
            table="",
            piece=(piece := dense_tensors.to_bytes({"w": torch.ones(1)})),
            all_parts_bytes=len(piece),
        ),
    )
    with followed_models({"m/t": 4}) as followed:
        applier = applier_of(brokers, _FailingModels(followed.lookup))
        assert not applier.statistics().is_running
        applier.start()
        wait_until(lambda: not applier.statistics().is_running)
        (running,) = (t for t in update_totals(applier) if "applier_running" in t.name)
        assert isinstance(running, MetricTotal) and not running.value
        with pytest.raises(RuntimeError, match=r"ended before: AssertionError\('a mis"):
            applier.close()
        applier.close()
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR] == [
        "no update is applied any more"
    ]


def test_statistics_are_read_while_it_runs(brokers: Brokers) -> None:
    """From several threads; they never go down."""
    brokers.make_topic("torchembed.m.t", 1)
    ending, seen = threading.Event(), list[list[int]]()

    def read(applier: UpdateApplier) -> None:
        numbers = list[int]()
        seen.append(numbers)
        while not ending.is_set():
            numbers.append(applier.statistics().num_rows)

    with (
        followed_models({"m/t": 4}) as models,
        UpdatePublisher(brokers.addresses) as publisher,
        applier_of(brokers, models) as applier,
    ):
        threads = [threading.Thread(target=read, args=(applier,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for version in range(1, 30):
            publisher.publish_rows("m", "t", torch.arange(3), torch.ones(3, 4), version=version)
        publisher.flush(LIMIT_SECONDS)
        wait_for_applied(applier, 29)
        ending.set()
        for thread in threads:
            thread.join(LIMIT_SECONDS)
    assert all(numbers == sorted(numbers) for numbers in seen)


def test_wrong_arguments_are_told(brokers: Brokers) -> None:
    with pytest.raises(ValueError, match="poll_timeout_seconds must be more than 0, got 0"):
        ApplierOptions(poll_timeout_seconds=0)
    with pytest.raises(ValueError, match=r"at most longest_back_off_seconds, got 3 and 2"):
        ApplierOptions(back_off_seconds=3)
    with followed_models({"m/t": 4}) as models, applier_of(brokers, models) as applier:
        with pytest.raises(RuntimeError, match="threads can only be started once"):
            applier.start()
        applier.close()
        with pytest.raises(ValueError, match="the source must be open"):
            applier.source.poll(0.1)
    unstarted = applier_of(brokers, models)
    unstarted.close()
    assert isinstance(unstarted.source, UpdateSource)


def test_dense_parts_of_equal_versions_follow_one_another(brokers: Brokers) -> None:
    with (
        followed_models({"m/t": 4}) as models,
        UpdatePublisher(brokers.addresses) as publisher,
        applier_of(brokers, models) as applier,
    ):
        for value in range(3):
            publisher.publish_dense("m", {"w": torch.full((3,), float(value))}, version=2)
        publisher.flush(LIMIT_SECONDS)
        wait_for_applied(applier, 3)
        assert torch.equal(models.dense["m"][1]["w"], torch.full((3,), 2.0))
