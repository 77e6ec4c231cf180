"""Consumers that are killed between applying updates and committing them."""

import random
import signal
from pathlib import Path

import torch

from tests.support.consumer_processes import (
    DIM,
    apply_to_the_end,
    apply_until_killed,
    apply_without_going_back,
)
from tests.support.kafka_brokers import running_brokers
from tests.support.store_processes import LIMIT_SECONDS, result_of, start
from torchembed.serving.updates import DropReason
from torchembed.streams import UpdatePublisher

NUM_VERSIONS, NUM_KILLS = 60, 3


def test_rows_are_the_publishers_however_often_consumers_are_killed(tmp_path: Path) -> None:
    """Each applies what the one before had applied and not committed once more, and no update is
    left out."""
    random_numbers, ids = random.Random(1), range(40)
    expected: dict[int, list[float]] = {}
    with running_brokers() as brokers:
        brokers.make_topic("torchembed.m.t", 2)
        with UpdatePublisher(brokers.addresses) as publisher:
            for version in range(1, NUM_VERSIONS + 1):
                chosen = torch.tensor(random_numbers.sample(ids, 12))
                is_last = version == NUM_VERSIONS
                keys, gone = (chosen, chosen[:0]) if is_last else (chosen[:8], chosen[8:])
                rows = torch.randn(len(keys), DIM)
                publisher.publish_rows("m", "t", keys, rows, version=version, deleted_keys=gone)
                expected |= dict(zip(keys.tolist(), rows.tolist(), strict=True))
                for id_ in gone.tolist():
                    expected.pop(id_, None)
            num_messages = publisher.sequence
        path = tmp_path / "rows"
        for _ in range(NUM_KILLS):
            consumer = start(apply_until_killed, brokers.addresses, path, 17)
            assert consumer.next_message() == "started"
            consumer.process.join(LIMIT_SECONDS)
            assert consumer.process.exitcode == -signal.SIGKILL
        num_applied, found = result_of(
            apply_to_the_end, brokers.addresses, path, list(ids), NUM_VERSIONS
        )
    assert found == expected
    # Those before committed 16 messages each at most, and some at all.
    assert num_messages - 16 * NUM_KILLS <= num_applied < num_messages


def test_no_row_ever_becomes_an_older_one(tmp_path: Path) -> None:
    """Also where a consumer dies with rows written and not on record, and the next one receives
    what it had written at once in smaller parts."""
    random_numbers, ids, last = random.Random(2), list(range(10)), 40
    with running_brokers() as brokers:
        brokers.make_topic("torchembed.m.t", 2)
        with UpdatePublisher(brokers.addresses) as publisher:
            for version in range(1, last + 1):
                keys = torch.tensor(ids if version == last else random_numbers.sample(ids, 6))
                rows = torch.full((len(keys), DIM), float(version))
                # All of one version of the model, so that they are written at once.
                publisher.publish_rows("m", "t", keys, rows, version=1)
        path = tmp_path / "rows"
        for max_messages, num_applied in ((25, 2), (2, 3), (9, 2)):
            arguments = brokers.addresses, path, ids, last, max_messages, num_applied
            consumer = start(apply_without_going_back, *arguments)
            assert consumer.next_message() == []
            consumer.process.join(LIMIT_SECONDS)
            assert consumer.process.exitcode == -signal.SIGKILL
        arguments = brokers.addresses, path, ids, last, 3, None
        failures, num_dropped = result_of(apply_without_going_back, *arguments)
    assert failures == []
    # Those that had been applied, and not committed, came again.
    assert set(num_dropped) <= {DropReason.REPEATED}
