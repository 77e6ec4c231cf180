"""The connection to Kafka's brokers: its settings, and the errors that it has."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

_LOG = logging.getLogger("torchembed.streams")
_OURS = frozenset(
    {
        *("acks", "auto.offset.reset", "bootstrap.servers", "enable.auto.commit"),
        *("enable.auto.offset.store", "enable.idempotence", "error_cb", "group.id"),
        *("message.max.bytes", "message.timeout.ms", "metadata.broker.list", "logger"),
    }
)


@dataclass(frozen=True, kw_only=True)
class BrokerOptions:
    """Options of connections to brokers."""

    start_timeout_seconds: float = 10.0
    """How long to wait for a broker at start."""
    client_settings: Mapping[str, str] = field(default_factory=dict)
    """Properties of librdkafka by their names there, such as ``security.protocol``, ``ssl.*`` and
    ``sasl.*``; not those on which our guarantees rest."""

    def __post_init__(self) -> None:
        if not self.start_timeout_seconds > 0:
            raise ValueError(
                f"start_timeout_seconds must be more than 0, got {self.start_timeout_seconds}"
            )
        taken = sorted(_OURS & self.client_settings.keys())
        if taken:
            raise ValueError(
                f"client_settings must not have {taken}, on which the order and the safety of "
                "updates rest; leave them out"
            )


class Client(Protocol):
    """A producer or a consumer."""

    def list_topics(self, *, timeout: float) -> Any: ...


def kafka() -> ModuleType:
    """The module ``confluent_kafka``.

    Raises:
        ModuleNotFoundError: where it is not installed.
    """
    try:
        import confluent_kafka
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "updates by Kafka need confluent-kafka: pip install 'torchembed[serving]'"
        ) from None
    return confluent_kafka


class BrokerErrors:
    """Counts what librdkafka says of connections, which it mends itself, and logs the first of a
    series."""

    def __init__(self, brokers: str) -> None:
        self._brokers = brokers
        self.num_errors = 0
        self.last: str = ""
        self._are_away = False

    def note(self, error: object) -> None:
        """Take an error, in the thread that polls."""
        self.num_errors += 1
        self.last = str(error)
        if not self._are_away:
            self._are_away = True
            _LOG.warning("brokers %s: %s; trying on", self._brokers, error)

    def note_answer(self) -> None:
        """Take note that brokers answer."""
        if self._are_away:
            self._are_away = False
            _LOG.info("brokers %s answer again", self._brokers)


def client_settings(brokers: str, options: BrokerOptions, errors: BrokerErrors) -> dict[str, Any]:
    """The settings that producers and consumers have in common.

    Raises:
        ValueError: for ``brokers`` that name none.
    """
    if not isinstance(brokers, str) or not brokers.strip(", "):
        raise ValueError(f"brokers must be 'host:port', or several by commas, got {brokers!r}")
    return {
        "reconnect.backoff.max.ms": 2000,
        "reconnect.backoff.ms": 50,
        # Or a connection that a firewall cut silently would be found by requests' timeouts alone.
        "socket.keepalive.enable": True,
        # Else librdkafka writes to standard error. Of failing connections error_cb tells as well.
        "log_level": 2,
        "logger": _LOG.getChild("librdkafka"),
        **options.client_settings,
        "bootstrap.servers": brokers,
        "error_cb": errors.note,
    }


def made_client(kind: str, settings: Mapping[str, Any]) -> Any:
    """A ``Producer`` or ``Consumer`` of ``confluent_kafka``, as ``kind`` says.

    Raises:
        ValueError: for properties that librdkafka does not have, or cannot use.
    """
    try:
        return getattr(kafka(), kind)(settings)
    except kafka().KafkaException as error:
        raise ValueError(
            "client_settings must be properties of librdkafka that it can use, and it says: "
            f"{error.args[0].str()}"
        ) from None


def check_answers(client: Client, brokers: str, options: BrokerOptions) -> None:
    """Return once a broker has answered.

    Raises:
        ConnectionError: where none does in time.
    """
    try:
        client.list_topics(timeout=options.start_timeout_seconds)
    except kafka().KafkaException as error:
        raise ConnectionError(
            f"brokers must answer within {options.start_timeout_seconds:g} s, and {brokers} did "
            f"not ({error.args[0].str()}); start them, or mend the addresses or client_settings"
        ) from None
