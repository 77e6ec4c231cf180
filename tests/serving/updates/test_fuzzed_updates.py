"""Messages that went wrong, from a broker to lookups: all are counted, and updates go on."""

import logging
import random
import time

import confluent_kafka
import torch

from tests.support.followed_models import followed_models
from tests.support.fuzzed_messages import NUM_FUZZED, fuzzed, messages_by_topic
from tests.support.kafka_brokers import running_brokers
from torchembed.serving.updates import ApplierOptions, UpdateApplier
from torchembed.streams import SourceOptions, UpdatePublisher, UpdateSource

_LOG = logging.getLogger(__name__)

LIMIT_SECONDS = 600.0
NUM_SENT = NUM_FUZZED // 5


def test_updates_go_on_behind_messages_that_went_wrong() -> None:
    random_numbers = random.Random(0)
    of_topics = messages_by_topic()
    options = SourceOptions(discovery_seconds=0.5)
    keys, rows = torch.arange(10), torch.randn(10, 2)
    with running_brokers() as brokers, followed_models({"m/t": 2}) as models:
        for topic in of_topics:
            brokers.make_topic(topic, 1)
        source = UpdateSource(brokers.addresses, "g", options)
        producer = confluent_kafka.Producer({"bootstrap.servers": brokers.addresses})
        applying = ApplierOptions(poll_timeout_seconds=0.05)
        with UpdateApplier(source, models, applying) as applier:
            deadline = time.monotonic() + LIMIT_SECONDS

            def wait_for(num_messages: int) -> None:
                while source.statistics.num_messages < num_messages:
                    assert time.monotonic() < deadline and applier.statistics().is_running
                    time.sleep(0.005)

            for number in range(1, NUM_SENT + 1):
                topic = random_numbers.choice(list(of_topics))
                producer.produce(topic, fuzzed(random_numbers, of_topics[topic]), partition=0)
                if number % 1000 == 0:
                    # Before the broker forgets some of them.
                    assert not producer.flush(LIMIT_SECONDS)
                    wait_for(number)
            assert not producer.flush(LIMIT_SECONDS)
            wait_for(NUM_SENT)
            # One of those had whatever version and was of whatever publisher.
            with UpdatePublisher(brokers.addresses) as publisher:
                publisher.publish_rows("m", "t", keys, rows, version=2**63 - 1)
                publisher.flush(LIMIT_SECONDS)
            wait_for(NUM_SENT + 1)
            expected = {id_: row.tolist() for id_, row in enumerate(rows)}
            while {i: row.tolist() for i, row in models.rows_of("m/t", range(10)).items()} != (
                expected
            ):
                assert time.monotonic() < deadline, applier.statistics()
                time.sleep(0.005)
            received, applied = source.statistics, applier.statistics()
            assert received.num_messages == NUM_SENT + 1
            assert received.num_dropped.total() > NUM_SENT / 2
            assert applied.num_updates > 1 and sum(applied.num_dropped.values()) > 1
            assert applied.num_retries == 0
            _LOG.info("%s", received)
            _LOG.info("%s", applied)
