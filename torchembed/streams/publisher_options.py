"""Options of publishers, and the counts of what they sent."""

import enum
from dataclasses import dataclass

from torchembed.streams import hugectr_messages
from torchembed.streams.brokers import BrokerOptions


class MessageForm(enum.Enum):
    """The form of the messages that are sent."""

    TORCHEMBED = "torchembed"
    HUGECTR = "hugectr"
    """Rows in float32 alone: no deletions, dense parts, versions or checksums."""


@dataclass(frozen=True, kw_only=True)
class PublisherOptions(BrokerOptions):
    """Options of the sending of updates."""

    form: MessageForm = MessageForm.TORCHEMBED
    hugectr_key_bytes: int = 8
    """Of keys in messages of HugeCTR's form: 4 or 8."""
    max_message_bytes: int = 900_000
    """What is larger is divided. Brokers take a mebibyte unless they are told otherwise."""
    queue_bytes: int = 1 << 28
    """Memory for what brokers have not taken yet."""
    queue_timeout_seconds: float = 60.0
    """How long a call waits for a place in the queue while brokers take nothing."""
    linger_seconds: float = 0.005
    """How long a message waits for others, to be sent with them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        hugectr_messages.check_key_bytes(self.hugectr_key_bytes)
        if self.max_message_bytes < 4096:
            raise ValueError(
                f"max_message_bytes must be at least 4096, got {self.max_message_bytes}"
            )
        if self.queue_bytes < 1 << 20 or self.queue_bytes < 2 * self.max_message_bytes:
            raise ValueError(
                "queue_bytes must be at least a mebibyte and two messages of max_message_bytes, "
                f"got {self.queue_bytes}"
            )
        if self.queue_timeout_seconds < 0 or self.linger_seconds < 0:
            raise ValueError(
                "queue_timeout_seconds and linger_seconds must not be negative, got "
                f"{self.queue_timeout_seconds} and {self.linger_seconds}"
            )


@dataclass
class PublisherStatistics:
    """Totals of a publisher."""

    num_messages: int = 0
    """That brokers have confirmed."""
    num_bytes: int = 0
    num_rows: int = 0
    """That were handed over, as the following."""
    num_deletions: int = 0
    num_dense_parts: int = 0
    num_waits: int = 0
    """How often a call had to wait since the queue was full."""
    num_refused_messages: int = 0
    num_broker_errors: int = 0
