"""Options of sources of updates, and the counts of what came."""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from torchembed.streams import hugectr_messages
from torchembed.streams.brokers import BrokerOptions
from torchembed.streams.message_error import MessageFault
from torchembed.streams.topics import DEFAULT_FILTER, check_model_name

MAX_MESSAGES = 1_000_000
"""Most messages that librdkafka gives at once."""


@dataclass(frozen=True, kw_only=True)
class SourceOptions(BrokerOptions):
    """Options of the receiving of updates."""

    models: tuple[str, ...] | None = None
    """Whose updates; None for those of all models."""
    topic_filters: tuple[str, ...] = (DEFAULT_FILTER,)
    """Regular expressions as Python has them, one of which must match the whole name of a topic
    that is to be read."""
    hugectr_key_bytes: int = 8
    """Of keys in HugeCTR's messages, which do not say it: 4 or 8."""
    discovery_seconds: float = 5.0
    """How often new topics are looked for."""
    max_messages: int = 1024
    """The most messages of one poll: a million at most, which is librdkafka's limit."""
    max_dense_bytes: int = 1 << 33
    """Of a whole dense part; larger ones are dropped."""
    session_timeout_seconds: float = 10.0
    """After how long without a sign of life the group gives the partitions of an instance to
    others; brokers want at least 6 s unless they are told otherwise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        hugectr_messages.check_key_bytes(self.hugectr_key_bytes)
        for model in self.models or ():
            check_model_name(model)
        if not self.topic_filters:
            raise ValueError("topic_filters must have a regular expression, got none; leave it out")
        for expression in self.topic_filters:
            try:
                re.compile(expression)
            except re.error as error:
                raise ValueError(
                    f"topic_filters must be regular expressions, got {expression!r}: {error}"
                ) from None
        for name in ("discovery_seconds", "max_messages", "max_dense_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0, got {getattr(self, name)}")
        if self.max_messages > MAX_MESSAGES:
            raise ValueError(
                f"max_messages must be at most {MAX_MESSAGES}, got {self.max_messages}"
            )
        if self.session_timeout_seconds < 0.1:
            raise ValueError(
                f"session_timeout_seconds must be at least 0.1, got {self.session_timeout_seconds}"
            )

    def matches(self, topic: str) -> bool:
        """True where a filter matches the name of a topic."""
        return any(re.fullmatch(expression, topic) for expression in self.topic_filters)


@dataclass
class SourceStatistics:
    """Totals of a source."""

    num_messages: int = 0
    """That came, whatever became of them."""
    num_bytes: int = 0
    num_rows: int = 0
    num_deletions: int = 0
    num_dense_parts: int = 0
    """That came whole."""
    num_beacons: int = 0
    num_dropped: Counter[MessageFault] = field(default_factory=Counter)
    """Messages that were dropped, by their fault."""
    num_given_back: int = 0
    """Messages that were left with the brokers for later, since their models or versions were not
    loaded."""
    num_broker_errors: int = 0
    num_failed_commits: int = 0
    """Each is made up for by the next one."""


class Lag(NamedTuple):
    """The distance of a source behind the publishers."""

    num_messages: int
    """In its partitions and not polled yet."""
    seconds: float
    """Since the last message that was polled was published; 0 where none is left."""
