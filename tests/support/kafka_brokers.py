"""Kafka's brokers for tests: those inside librdkafka, which other processes reach by TCP as well.

They keep what they are sent in memory while they are "down", and forget it at the end.
"""

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import confluent_kafka

REBALANCE_DELAY_MILLISECONDS = 50
"""Of a group that is new; three seconds by default."""


@functools.cache
def _library() -> ctypes.CDLL:
    packages = Path(confluent_kafka.__file__).parent.parent
    (path,) = (packages / "confluent_kafka.libs").glob("librdkafka*")
    library = ctypes.CDLL(str(path))
    for name, result, arguments in (
        ("rd_kafka_conf_new", ctypes.c_void_p, []),
        (
            "rd_kafka_new",
            ctypes.c_void_p,
            [ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t],
        ),
        (
            "rd_kafka_conf_set",
            ctypes.c_int,
            [ctypes.c_void_p, *[ctypes.c_char_p] * 3, ctypes.c_size_t],
        ),
        ("rd_kafka_destroy", None, [ctypes.c_void_p]),
        ("rd_kafka_mock_cluster_new", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int]),
        ("rd_kafka_mock_cluster_destroy", None, [ctypes.c_void_p]),
        ("rd_kafka_mock_cluster_bootstraps", ctypes.c_char_p, [ctypes.c_void_p]),
        (
            "rd_kafka_mock_topic_create",
            ctypes.c_int,
            [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int],
        ),
        ("rd_kafka_mock_broker_set_down", ctypes.c_int, [ctypes.c_void_p, ctypes.c_int32]),
        ("rd_kafka_mock_broker_set_up", ctypes.c_int, [ctypes.c_void_p, ctypes.c_int32]),
        (
            "rd_kafka_mock_push_request_errors_array",
            None,
            [ctypes.c_void_p, ctypes.c_int16, ctypes.c_size_t, ctypes.c_void_p],
        ),
        ("rd_kafka_mock_group_initial_rebalance_delay_ms", None, [ctypes.c_void_p, ctypes.c_int32]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Brokers:
    """One broker, or several."""

    def __init__(self, cluster: int, num_brokers: int) -> None:
        self._cluster, self._num_brokers = cluster, num_brokers
        self.addresses: str = _library().rd_kafka_mock_cluster_bootstraps(cluster).decode()

    def make_topic(self, name: str, num_partitions: int) -> None:
        assert not _library().rd_kafka_mock_topic_create(
            self._cluster, name.encode(), num_partitions, 1
        )

    def refuse_next_messages(self, *errors: int) -> None:
        """Answer the next requests to take messages with ``errors``, numbers of Kafka's."""
        produce = 0
        _library().rd_kafka_mock_push_request_errors_array(
            self._cluster, produce, len(errors), (ctypes.c_int * len(errors))(*errors)
        )

    def go_away(self) -> None:
        """Close all connections, and take no new ones."""
        for number in range(1, self._num_brokers + 1):
            assert not _library().rd_kafka_mock_broker_set_down(self._cluster, number)

    def come_back(self) -> None:
        for number in range(1, self._num_brokers + 1):
            assert not _library().rd_kafka_mock_broker_set_up(self._cluster, number)


@contextmanager
def running_brokers(num_brokers: int = 1) -> Iterator[Brokers]:
    """Brokers in this process, on free ports of the loopback address."""
    library = _library()
    text = ctypes.create_string_buffer(512)
    settings = library.rd_kafka_conf_new()
    library.rd_kafka_conf_set(settings, b"log_level", b"0", text, len(text))
    holder = library.rd_kafka_new(0, settings, text, len(text))
    assert holder, text.value
    cluster = library.rd_kafka_mock_cluster_new(holder, num_brokers)
    library.rd_kafka_mock_group_initial_rebalance_delay_ms(cluster, REBALANCE_DELAY_MILLISECONDS)
    try:
        yield Brokers(cluster, num_brokers)
    finally:
        library.rd_kafka_mock_cluster_destroy(cluster)
        library.rd_kafka_destroy(holder)
