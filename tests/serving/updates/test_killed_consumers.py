"""Consumers that are killed between applying updates and committing them."""

import random
import signal
from pathlib import Path

import torch

from tests.support.consumer_processes import DIM, apply_to_the_end, apply_until_killed
from tests.support.kafka_brokers import running_brokers
from tests.support.store_processes import LIMIT_SECONDS, result_of, start
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
