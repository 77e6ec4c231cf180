"""Kafka for a run that has none."""

import contextlib
from collections.abc import Iterator

import confluent_kafka


@contextlib.contextmanager
def own_broker() -> Iterator[str]:
    """The address of a broker in this process, the one inside librdkafka, which other processes
    reach, too. What it holds ends with the context."""
    producer = confluent_kafka.Producer({"test.mock.num.brokers": 1, "log_level": 2})
    (broker,) = producer.list_topics(timeout=10).brokers.values()
    yield f"{broker.host}:{broker.port}"
    producer.flush(0)
