"""Messages that cannot be read."""

import enum


class MessageFault(enum.Enum):
    """The fault of a message; values are those of counters."""

    TRUNCATED = "truncated"
    """It ends before what it says that it holds, or in the middle of a pair."""
    TRAILING = "trailing"
    """It goes on behind what it says that it holds."""
    MAGIC = "magic"
    """It begins as no message of the topic's format does."""
    FORMAT = "format"
    """It has a version of the format that this release does not know."""
    CHECKSUM = "checksum"
    """It is not as it was written."""
    CONTENTS = "contents"
    """A field has a value that it cannot have."""
    TOPIC = "topic"
    """It names another model or table than its topic does, or the topic names none."""
    TABLE = "table"
    """It is of a table that is not served."""
    WIDTH = "width"
    """Its rows have another width than the table."""
    TOO_LARGE = "too_large"
    """What it says that it holds, or is a part of, is larger than allowed."""
    INCOMPLETE = "incomplete"
    """A part of a dense update, the rest of which never came."""


class MessageError(ValueError):
    """A message cannot be read, and is to be dropped.

    Attributes:
        fault: why.
    """

    def __init__(self, fault: MessageFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault
