"""Hands messages to brokers, and waits for them."""

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torchembed.streams.brokers import (
    BrokerErrors,
    check_answers,
    client_settings,
    kafka,
    made_client,
)
from torchembed.streams.publisher_options import PublisherOptions, PublisherStatistics

_LOG = logging.getLogger("torchembed.streams")
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.01, 0.5
_KAFKA_OVERHEAD_BYTES = 1 << 10

_T = TypeVar("_T")


class DeliveryError(ConnectionError):
    """Brokers refused messages for good, which are lost: publish whole tables once more."""


class MessageSender:
    """An idempotent producer: each message goes once and in order, however long brokers are away.

    Raises:
        ConnectionError: where no broker answers in time.
    """

    def __init__(
        self, brokers: str, options: PublisherOptions, statistics: PublisherStatistics
    ) -> None:
        self._brokers, self._options, self._statistics = brokers, options, statistics
        self._errors = BrokerErrors(brokers)
        self._producer = self._new_producer()
        check_answers(self._producer, brokers, options)
        self._num_partitions: dict[str, int] = {}
        self._refusals: list[str] = []
        self._is_purged = self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Number of messages that brokers have not confirmed yet."""
        return len(self._producer)

    def check(self) -> None:
        """Raise where the sender is closed, or brokers refused what was sent before."""
        if self._is_closed:
            raise ValueError("the publisher must be open, got a closed one; make another")
        self._serve(0)
        self._raise_refusals()

    def _new_producer(self) -> Any:
        settings = client_settings(self._brokers, self._options, self._errors) | {
            "acks": "all",
            "enable.idempotence": True,
            "message.timeout.ms": 0,  # brokers may be away for any time
            "message.max.bytes": self._options.max_message_bytes + _KAFKA_OVERHEAD_BYTES,
            "queue.buffering.max.kbytes": self._options.queue_bytes >> 10,
            "queue.buffering.max.messages": 1_000_000,
            "linger.ms": self._options.linger_seconds * 1000,
        }
        return made_client("Producer", settings)

    def flush(self, timeout_seconds: float) -> None:
        """Return once brokers have all that was published.

        Raises:
            TimeoutError: where they have not in time; what is left is sent on.
            DeliveryError: where they refused some of it for good.
        """
        self.check()
        num_left = self._serve(timeout_seconds, flush=True)
        self._raise_refusals()
        if num_left:
            raise TimeoutError(
                f"brokers {self._brokers} must take all messages within {timeout_seconds:g} s, and "
                f"{num_left} are left ({self._errors.last or 'no error was told'}); they are sent "
                "on; call flush again"
            )

    def close(self, timeout_seconds: float = 30.0) -> None:
        """Send what is left, and release the connection; a second call does nothing.

        Raises:
            TimeoutError: where brokers do not take all in time; what is left is lost.
            DeliveryError: where they refused some of it for good.
        """
        if self._is_closed:
            return
        num_left = self._serve(timeout_seconds, flush=True)
        self._is_closed = True
        if num_left:
            self._purge()
            raise TimeoutError(
                f"brokers {self._brokers} must take all messages within {timeout_seconds:g} s, and "
                f"{num_left} are lost ({self._errors.last or 'no error was told'}); publish whole "
                "tables once more"
            )
        self._raise_refusals()

    def partitions_of(self, topic: str) -> int:
        """The number of partitions of a topic, which is asked for once: keys stay where they are
        even if it grows."""

        def ask() -> int:
            timeout = min(1.0, self._options.queue_timeout_seconds)
            found = self._producer.list_topics(topic=topic, timeout=timeout).topics[topic]
            if found.error is not None:
                raise kafka().KafkaException(found.error)
            return len(found.partitions)

        if topic not in self._num_partitions:
            self._num_partitions[topic] = self._until_done(ask, f"make topic {topic}")
        return self._num_partitions[topic]

    def send(self, topic: str, partition: int, data: bytes) -> None:
        """Put a message in the queue, waiting for a place.

        Raises:
            TimeoutError: where the queue stays full.
            DeliveryError: where brokers refused what was sent before.
        """

        def produce() -> None:
            self._producer.produce(
                topic, data, partition=partition, on_delivery=self._note_delivery
            )

        self._until_done(produce, f"take messages of {topic}")
        self._serve(0)

    def _until_done(self, call: Callable[[], _T], what: str) -> _T:
        """The result of ``call``, which is called anew while brokers do not answer."""
        deadline = time.monotonic() + self._options.queue_timeout_seconds
        wait = _FIRST_WAIT_SECONDS
        while True:
            try:
                return call()
            except (BufferError, kafka().KafkaException) as error:
                if isinstance(error, kafka().KafkaException):
                    self._note_if_fatal(error)
                    self._raise_refusals()
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"brokers {self._brokers} must {what} within "
                        f"{self._options.queue_timeout_seconds:g} s, and did not ({error}); "
                        "publish it again once they answer"
                    ) from None
            self._statistics.num_waits += 1
            # Takes what brokers confirm, which makes place.
            self._serve(wait)
            self._raise_refusals()
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)

    def _serve(self, timeout_seconds: float, *, flush: bool = False) -> int:
        """Take what brokers confirm or refuse; how many messages are left."""
        try:
            if flush:
                return self._producer.flush(timeout_seconds)
            self._producer.poll(timeout_seconds)
        except (kafka().KafkaException, SystemError) as error:
            # A fatal error is raised by the call that learns of it; where a message is refused for
            # it in the same call, Python complains of the callback instead.
            cause = error.__cause__ if isinstance(error, SystemError) else error
            if cause is None or not isinstance(cause, kafka().KafkaException):
                raise
            self._note_if_fatal(cause)
        return len(self._producer)

    def _note_if_fatal(self, error: BaseException) -> None:
        """Let another producer take over from one that has lost its place in the order of messages:
        it refuses all that are left, and all further ones."""
        of_kafka = error.args[0]
        if not of_kafka.fatal() and of_kafka.code() != kafka().KafkaError._FATAL:
            return
        num_left = len(self._producer)
        self._statistics.num_refused_messages += num_left
        if num_left or not self._refusals:
            self._refusals += [of_kafka.str()] * max(num_left, 1)
        self._purge()
        self._producer = self._new_producer()

    def _purge(self) -> None:
        """Let go of what is left, so that the producer ends."""
        producer, self._is_purged = self._producer, True
        producer.purge()
        try:
            producer.flush(1.0)
        except (kafka().KafkaException, SystemError):
            _LOG.debug("a producer that is let go of told its error again", exc_info=True)
        self._is_purged = False

    def _note_delivery(self, error: Any, message: Any) -> None:
        self._statistics.num_broker_errors = self._errors.num_errors
        if error is None:
            self._statistics.num_messages += 1
            self._statistics.num_bytes += len(message)
            self._errors.note_answer()
            return
        if self._is_purged:
            return
        self._statistics.num_refused_messages += 1
        self._refusals.append(f"{message.topic()}: {error.str()}")

    def _raise_refusals(self) -> None:
        if not self._refusals:
            return
        num_refused, first = len(self._refusals), self._refusals[0]
        self._refusals.clear()
        raise DeliveryError(
            f"brokers {self._brokers} must take all messages, and refused {num_refused} for good "
            f"({first}); mend it, and publish whole tables once more"
        )
