"""Publishers and sources over brokers: what is read is what was published."""

import logging
import time
from collections.abc import Iterator

import confluent_kafka
import pytest
import torch
from torch import Tensor

from tests.support.kafka_brokers import Brokers, running_brokers
from torchembed.core.key_partitions import partition_of
from torchembed.serving.updates.update_order import UpdateOrder
from torchembed.streams import (
    DeliveryError,
    DenseUpdate,
    MessageFault,
    MessageForm,
    PublisherOptions,
    RowUpdate,
    SourceOptions,
    Update,
    UpdatePublisher,
    UpdateSource,
)
from torchembed.streams.hugectr_messages import encode_pairs

LIMIT_SECONDS = 120.0
QUICK = SourceOptions(discovery_seconds=0.1, session_timeout_seconds=1.0)
"""The next instance of a group has its partitions a second after the one before has ended."""
ALONE = SourceOptions(discovery_seconds=0.1)
"""Of a group's one instance, which stays in it also while brokers are away for a while."""


@pytest.fixture
def brokers() -> Iterator[Brokers]:
    with running_brokers() as brokers:
        yield brokers


def updates_until(source: UpdateSource, num_messages: int) -> list[Update]:
    """The updates of the next messages, dropped ones counted, which must come before a limit."""
    deadline, wanted = time.monotonic() + LIMIT_SECONDS, source.statistics.num_messages
    wanted, found = wanted + num_messages, []
    while source.statistics.num_messages < wanted:
        assert time.monotonic() < deadline, f"{source.statistics} of {wanted} messages"
        found += source.poll(0.2)
    return found


def rows_of(updates: list[Update]) -> dict[int, Tensor]:
    """The rows by key after updates of one table."""
    rows: dict[int, Tensor] = {}
    for update in updates:
        assert isinstance(update, RowUpdate)
        rows.update(zip(update.keys.tolist(), update.rows, strict=True))
        for key in update.deleted_keys.tolist():
            rows.pop(key, None)
    return rows


def send(brokers: Brokers, topic: str, *messages: bytes) -> None:
    """Send raw messages as any other program does."""
    producer = confluent_kafka.Producer({"bootstrap.servers": brokers.addresses})
    for message in messages:
        producer.produce(topic, message, partition=0)
    assert not producer.flush(LIMIT_SECONDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_deletions_and_dense_parts_arrive(brokers: Brokers, dtype: torch.dtype) -> None:
    """Divided into messages of the size that is allowed, each in the partition of its keys."""
    brokers.make_topic("torchembed.m.users", 3)
    brokers.make_topic("torchembed-dense.m", 2)
    options = PublisherOptions(max_message_bytes=4096)
    keys, rows = torch.arange(-500, 500), torch.randn(1000, 16).to(dtype)
    dense = {"w": torch.randn(50, 30), "b": torch.randn(7).half()}
    before = time.time()
    with (
        UpdatePublisher(brokers.addresses, options) as publisher,
        UpdateSource(brokers.addresses, "g", QUICK) as source,
    ):
        publisher.publish_rows("m", "users", keys, rows, version=3)
        publisher.publish_rows(
            "m", "users", keys[:2], -rows[:2], version=4, deleted_keys=keys[500:]
        )
        publisher.publish_dense("m", dense, version=5)
        publisher.flush(LIMIT_SECONDS)
        assert publisher.num_waiting == 0
        assert publisher.statistics.num_messages == publisher.sequence
        assert publisher.statistics.num_rows == 1002
        updates = updates_until(source, publisher.sequence)
        assert source.statistics.num_bytes == publisher.statistics.num_bytes
        assert source.lag() == (0, 0.0)
    found = [u for u in updates if isinstance(u, RowUpdate)]
    held = rows_of(list(found))
    assert held.keys() == set(range(-500, 0))
    for key, row in held.items():
        assert torch.equal(row, rows[key + 500] if key >= -498 else -rows[key + 500])
    last: dict[int, int] = {}
    for update in found:
        assert (update.model, update.table) == ("m", "users")
        both = torch.cat([update.keys, update.deleted_keys])
        partition = update.origin.partition
        assert (partition_of(both, 3) == partition).all()
        assert last.get(partition, 0) < update.sequence
        last[partition] = update.sequence
        assert before < update.origin.published_at < time.time()
    (whole,) = [u for u in updates if isinstance(u, DenseUpdate)]
    assert (whole.model, whole.version, whole.sequence) == ("m", 5, publisher.sequence)
    assert whole.tensors.keys() == dense.keys()
    for name, tensor in dense.items():
        assert torch.equal(whole.tensors[name], tensor)


def test_publishers_that_begin_at_once_are_told_apart(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ranks do, and as one that begins again does after the clock was set back."""
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000_000_000_000)
    with UpdateSource(brokers.addresses, "g", QUICK) as source:
        for _ in range(3):
            with UpdatePublisher(brokers.addresses) as publisher:
                publisher.publish_rows("m", "t", torch.tensor([7]), torch.ones(1, 2), version=1)
        updates = updates_until(source, 3)
    order = UpdateOrder()
    for update in updates:
        assert order.why_not(update) is None
        order.note_applied([update])
    assert len({update.origin.publisher for update in updates}) == 3


def test_topics_are_found_while_a_source_runs_by_the_default_filter(
    brokers: Brokers, caplog: pytest.LogCaptureFixture
) -> None:
    """HugeCTR's filter matched nothing, and nobody was told."""
    with (
        caplog.at_level(logging.WARNING, "torchembed.streams"),
        UpdateSource(brokers.addresses, "g", QUICK) as source,
    ):
        assert source.poll(0.2) == []
        assert source.poll(0.2) == []
        (told,) = [r.getMessage() for r in caplog.records]
        assert told.startswith(f"none of the 0 topics of {brokers.addresses} matches ")
        keys, rows = torch.tensor([1, 2]), torch.ones(2, 3)
        with UpdatePublisher(brokers.addresses) as publisher:
            publisher.publish_rows("m", "t", keys, rows, version=1)
            publisher.flush(LIMIT_SECONDS)
            num_messages = publisher.sequence
        send(brokers, "hps_et.m.h", encode_pairs(keys, rows))
        updates = updates_until(source, num_messages + 1)
    assert {u.table for u in updates if isinstance(u, RowUpdate)} == {"t", "h"}


def test_models_and_filters_choose_topics(brokers: Brokers) -> None:
    for topic in ("torchembed.a.t", "torchembed.b.t", "hps_et.a.t", "torchembed-dense.a", "other"):
        brokers.make_topic(topic, 1)
    for options, expected in (
        ({"models": ("a",)}, {"torchembed.a.t", "hps_et.a.t", "torchembed-dense.a"}),
        ({"topic_filters": (r"hps_et\..+", r"torchembed\.b\.t")}, {"hps_et.a.t", "torchembed.b.t"}),
        ({"topic_filters": (".+",), "models": ("b",)}, {"torchembed.b.t"}),
    ):
        with UpdateSource(brokers.addresses, "g", SourceOptions(**options)) as source:  # type: ignore[arg-type]
            assert source.topics == expected


@pytest.mark.parametrize("key_bytes", [4, 8])
def test_hugectr_messages_go_both_ways(brokers: Brokers, key_bytes: int) -> None:
    options = PublisherOptions(form=MessageForm.HUGECTR, hugectr_key_bytes=key_bytes)
    reading = SourceOptions(hugectr_key_bytes=key_bytes, session_timeout_seconds=1.0)
    keys, rows = torch.arange(100), torch.randn(100, 8)
    brokers.make_topic("hps_et.m.t", 2)
    send(brokers, "hps_et.m.t", b"HCTR\x08\0\0\0")
    before = time.time()
    with UpdatePublisher(brokers.addresses, options) as publisher:
        publisher.publish_rows("m", "t", keys, rows, version=1)
        with pytest.raises(ValueError, match="deleted_keys must be empty for HugeCTR"):
            publisher.publish_rows("m", "t", keys, rows, version=1, deleted_keys=keys + 200)
        with pytest.raises(ValueError, match=r"form must be MessageForm.TORCHEMBED for dense"):
            publisher.publish_dense("m", {}, version=1)
        publisher.flush(LIMIT_SECONDS)
        with UpdateSource(brokers.addresses, "g", reading) as source:
            updates = updates_until(source, publisher.sequence + 1)
            assert source.statistics.num_beacons == 1
    held = rows_of(updates)
    assert held.keys() == set(range(100))
    assert all(torch.equal(row, rows[key]) for key, row in held.items())
    for update in updates:
        assert update.version == 0
        assert before - 1 < update.origin.published_at < time.time() + 1


def test_messages_that_cannot_be_read_are_dropped_and_counted(
    brokers: Brokers, caplog: pytest.LogCaptureFixture
) -> None:
    brokers.make_topic("torchembed.m.t", 1)
    brokers.make_topic("torchembed.m.unknown", 1)
    pairs = encode_pairs(torch.tensor([1]), torch.zeros(1, 2))
    wrong = [b"", b"TEMB", pairs, b"\0" * 200]
    send(brokers, "torchembed.m.t", *wrong)

    def width_of(model: str, table: str) -> int | None:
        return {("m", "t"): 4}.get((model, table))

    keys = torch.tensor([1])
    with (
        caplog.at_level(logging.WARNING, "torchembed.streams"),
        UpdatePublisher(brokers.addresses) as publisher,
        UpdateSource(brokers.addresses, "g", QUICK, width_of=width_of) as source,
    ):
        publisher.publish_rows("m", "t", keys, torch.ones(1, 5), version=1)
        publisher.publish_rows("m", "unknown", keys, torch.ones(1, 4), version=1)
        publisher.publish_rows("m", "t", keys, torch.ones(1, 4), version=1)
        publisher.flush(LIMIT_SECONDS)
        (update,) = updates_until(source, len(wrong) + 3)
        assert isinstance(update, RowUpdate)
        assert torch.equal(update.rows, torch.ones(1, 4))
        assert source.statistics.num_dropped == {
            MessageFault.TRUNCATED: 2,
            MessageFault.MAGIC: 2,
            MessageFault.WIDTH: 1,
            MessageFault.TABLE: 1,
        }
    told = [record.getMessage() for record in caplog.records]
    assert sum("dropped message" in line for line in told) == 4  # of each fault the first
    assert any("rows of m/t must have width 4, got 5" in line for line in told)


def test_brokers_that_do_not_answer_at_start_are_an_error_in_time(brokers: Brokers) -> None:
    brokers.go_away()
    began = time.monotonic()
    text = f"brokers must answer within 0.3 s, and {brokers.addresses} did not .*; start them"
    with pytest.raises(ConnectionError, match=text):
        UpdatePublisher(brokers.addresses, PublisherOptions(start_timeout_seconds=0.3))
    with pytest.raises(ConnectionError, match=text):
        UpdateSource(brokers.addresses, "g", SourceOptions(start_timeout_seconds=0.3))
    assert time.monotonic() - began < LIMIT_SECONDS


def test_nothing_is_lost_while_brokers_are_away(brokers: Brokers) -> None:
    brokers.make_topic("torchembed.m.t", 2)
    keys = torch.arange(50)
    with (
        UpdatePublisher(brokers.addresses) as publisher,
        UpdateSource(brokers.addresses, "g", ALONE) as source,
    ):
        publisher.publish_rows("m", "t", keys, torch.zeros(50, 4), version=1)
        publisher.flush(LIMIT_SECONDS)
        updates = updates_until(source, publisher.sequence)
        brokers.go_away()
        for version in range(2, 12):
            publisher.publish_rows(
                "m", "t", keys, torch.full((50, 4), float(version)), version=version
            )
        with pytest.raises(
            TimeoutError, match=r"within 0.3 s, and 20 are left .* call flush again"
        ):
            publisher.flush(0.3)
        assert source.poll(0.1) == []
        while not source.statistics.num_broker_errors:
            assert source.poll(0.1) == []
        brokers.come_back()
        publisher.flush(LIMIT_SECONDS)
        assert publisher.statistics.num_broker_errors > 0
        updates = []
        while [u.version for u in updates].count(11) < 2:
            updates += updates_until(source, 1)
        for partition in range(2):
            versions = [u.version for u in updates if u.origin.partition == partition]
            # The first may come again, since it was not committed.
            assert [version for version in versions if version > 1] == list(range(2, 12))
        held = rows_of(updates)
        assert held.keys() == set(range(50))
        assert all(torch.equal(row, torch.full((4,), 11.0)) for row in held.values())


def test_a_full_queue_is_an_error_in_time_and_closing_tells_what_is_lost(brokers: Brokers) -> None:
    options = PublisherOptions(queue_bytes=1 << 21, queue_timeout_seconds=0.3)
    rows, keys = torch.zeros(1000, 256), torch.arange(1000)
    brokers.make_topic("torchembed.m.t", 1)
    publisher = UpdatePublisher(brokers.addresses, options)
    publisher.publish_rows("m", "t", keys[:1], rows[:1], version=1)
    publisher.flush(LIMIT_SECONDS)
    brokers.go_away()

    def publish_more_than_it_holds() -> None:
        for _ in range(10):
            publisher.publish_rows("m", "t", keys, rows, version=1)

    with pytest.raises(TimeoutError, match=r"must take messages of torchembed.m.t within 0.3 s"):
        publish_more_than_it_holds()
    assert publisher.statistics.num_waits > 0
    with pytest.raises(TimeoutError, match=r"within 0.1 s, and \d are lost .*; publish whole"):
        publisher.close(0.1)
    publisher.close()
    with pytest.raises(ValueError, match="the publisher must be open, got a closed one"):
        publisher.flush(1.0)


def test_messages_that_brokers_refuse_are_an_error_and_others_follow(brokers: Brokers) -> None:
    brokers.make_topic("torchembed.m.t", 1)
    keys, rows = torch.arange(30), torch.zeros(30, 8)
    with UpdatePublisher(brokers.addresses) as publisher:
        for error, text in (
            (10, "Broker: Message size too large"),
            (29, "authorization"),
            (45, "sequence"),  # after which a producer refuses everything
        ):
            brokers.refuse_next_messages(error)
            publisher.publish_rows("m", "t", keys, rows, version=1)
            with pytest.raises(DeliveryError, match=rf"refused 1 for good .*{text}.*; mend it"):
                publisher.flush(LIMIT_SECONDS)
            publisher.publish_rows("m", "t", keys, rows, version=1)
            publisher.flush(LIMIT_SECONDS)
        assert publisher.statistics.num_refused_messages == 3
        assert publisher.statistics.num_messages == 3


def test_what_was_not_committed_comes_again_and_dense_parts_from_their_first(
    brokers: Brokers,
) -> None:
    brokers.make_topic("torchembed.m.t", 1)
    brokers.make_topic("torchembed-dense.m", 1)
    keys = torch.tensor([1])
    with UpdatePublisher(brokers.addresses) as publisher:

        def publish(version: int) -> None:
            publisher.publish_rows("m", "t", keys, torch.ones(1, 4), version=version)
            publisher.flush(LIMIT_SECONDS)

        publish(1)
        publish(2)
        with UpdateSource(brokers.addresses, "g", QUICK) as source:
            updates_until(source, 2)
            source.commit()
            publish(3)
            updates_until(source, 1)
        with UpdateSource(brokers.addresses, "g", QUICK) as source:
            (update,) = updates_until(source, 1)
            assert update.version == 3
            source.commit()
            assert source.lag().num_messages == 0
            # A source that reads one message of a dense part, and then ends.
            publisher.publish_dense("m", {"w": torch.ones(300_000)}, version=4)
            publisher.flush(LIMIT_SECONDS)
            assert publisher.sequence == 5
        one = SourceOptions(max_messages=1, session_timeout_seconds=1.0)
        with UpdateSource(brokers.addresses, "g", one) as source:
            assert updates_until(source, 1) == []
            assert source.lag().num_messages == 1
            assert source.lag().seconds > 0
            source.commit()
        with UpdateSource(brokers.addresses, "g", QUICK) as source:
            (update,) = updates_until(source, 2)
            assert isinstance(update, DenseUpdate)
            assert torch.equal(update.tensors["w"], torch.ones(300_000))


def test_instances_of_a_group_share_partitions(brokers: Brokers) -> None:
    brokers.make_topic("torchembed.m.t", 4)
    keys = torch.arange(100)
    with (
        UpdatePublisher(brokers.addresses) as publisher,
        UpdateSource(brokers.addresses, "g", QUICK) as one,
        UpdateSource(brokers.addresses, "g", QUICK) as other,
        UpdateSource(brokers.addresses, "alone", QUICK) as alone,
    ):
        deadline = time.monotonic() + LIMIT_SECONDS
        sources = (one, other, alone)
        while [source.num_partitions for source in sources] != [2, 2, 4]:
            assert time.monotonic() < deadline
            for source in sources:
                source.poll(0.05)
        publisher.publish_rows("m", "t", keys, torch.ones(100, 4), version=1)
        publisher.flush(LIMIT_SECONDS)
        of_one, of_other = updates_until(one, 2), updates_until(other, 2)
        of_alone = updates_until(alone, 4)
    assert not rows_of(of_one).keys() & rows_of(of_other).keys()
    assert rows_of(of_one + of_other).keys() == rows_of(of_alone).keys() == set(range(100))


def test_wrong_arguments_are_told(brokers: Brokers) -> None:
    with pytest.raises(ValueError, match=r"brokers must be 'host:port', .* got ' '"):
        UpdatePublisher(" ")
    with pytest.raises(ValueError, match="group must be a name, got ''"):
        UpdateSource(brokers.addresses, "")
    with pytest.raises(ValueError, match=r"client_settings must not have \['acks'\]"):
        PublisherOptions(client_settings={"acks": "0"})
    with pytest.raises(ValueError, match=r"topic_filters must be regular .* got '\('"):
        SourceOptions(topic_filters=("(",))
    with pytest.raises(ValueError, match="max_messages must be at most 1000000, got 1000001"):
        SourceOptions(max_messages=1_000_001)
    with pytest.raises(ValueError, match=r"model must have 1 to 120 letters, .* got 'a.b'"):
        SourceOptions(models=("a.b",))
    for settings, told in (
        ({"no.such": "x"}, 'No such configuration property: "no.such"'),
        ({"security.protocol": "SSL", "ssl.ca.location": "/nowhere"}, "/nowhere|ssl"),
    ):
        message = f"client_settings must be properties of librdkafka .*, and it says: .*({told})"
        with pytest.raises(ValueError, match=message):
            UpdateSource(brokers.addresses, "g", SourceOptions(client_settings=settings))
        with pytest.raises(ValueError, match=message):
            UpdatePublisher(brokers.addresses, PublisherOptions(client_settings=settings))
    with UpdatePublisher(brokers.addresses) as publisher:
        keys, rows = torch.tensor([1, 2]), torch.ones(2, 3)
        with pytest.raises(ValueError, match=r"rows must be \[2, D\], .* got \(1, 3\)"):
            publisher.publish_rows("m", "t", keys, rows[:1], version=1)
        with pytest.raises(TypeError, match="keys must be int64, got int32"):
            publisher.publish_rows("m", "t", keys.int(), rows, version=1)
        with pytest.raises(ValueError, match=r"version must be an int64 .* got -1"):
            publisher.publish_rows("m", "t", keys, rows, version=-1)
        with pytest.raises(ValueError, match=r"table must have 1 to 120 letters, .* got 'a b'"):
            publisher.publish_rows("m", "a b", keys, rows, version=1)
