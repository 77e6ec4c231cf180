"""Gathers the parts of dense updates."""

from dataclasses import dataclass, field

from torchembed.streams.message_error import MessageError, MessageFault
from torchembed.streams.messages import Message


@dataclass
class _Gathered:
    first: Message
    first_offset: int
    pieces: list[bytes] = field(default_factory=list)
    num_bytes: int = 0


class DenseGathering:
    """Puts together the parts of one model's dense updates, of one at a time.

    Parts of an update come in order in one partition, and have sequence numbers that follow one
    another. An update that begins later takes the place of one that is not whole.

    Args:
        max_bytes: of all parts of an update.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._gathered: _Gathered | None = None
        self.num_given_up = 0
        """Updates that were begun and never came whole."""

    @property
    def first_offset(self) -> int | None:
        """The offset of the first part of the update that is not whole yet, None where there is
        none: what follows must be read again after a restart."""
        return None if self._gathered is None else self._gathered.first_offset

    def add(self, message: Message, offset: int) -> bytes | None:
        """The bytes of an update that ``message`` makes whole, else None.

        Raises:
            MessageError: for a part that belongs to none, or does not fit the parts before it.
        """
        if message.all_parts_bytes > self._max_bytes:
            raise MessageError(
                MessageFault.TOO_LARGE,
                f"a dense part must have at most {self._max_bytes} bytes, got "
                f"{message.all_parts_bytes}",
            )
        gathered = self._gathered
        if gathered is None or _identity(message) != _identity(gathered.first):
            gathered = self._begin(message, offset)
        if message.part < len(gathered.pieces):
            return None  # a duplicate
        self._check_follows(gathered, message)
        gathered.pieces.append(message.piece)
        gathered.num_bytes += len(message.piece)
        if len(gathered.pieces) < message.num_parts:
            return None
        self._gathered = None
        if gathered.num_bytes != message.all_parts_bytes:
            raise MessageError(
                MessageFault.CONTENTS,
                f"parts of a dense update must have {message.all_parts_bytes} bytes, got "
                f"{gathered.num_bytes}",
            )
        return b"".join(gathered.pieces)

    def _begin(self, message: Message, offset: int) -> _Gathered:
        if message.part:
            raise MessageError(
                MessageFault.INCOMPLETE,
                f"part {message.part} of a dense update came without those before it",
            )
        self._give_up()
        self._gathered = _Gathered(message, offset)
        return self._gathered

    def _check_follows(self, gathered: _Gathered, message: Message) -> None:
        first = gathered.first
        if message.part != len(gathered.pieces):
            self._give_up()
            raise MessageError(
                MessageFault.INCOMPLETE,
                f"part {message.part} of a dense update followed {len(gathered.pieces)} parts",
            )
        is_same = (message.num_parts, message.all_parts_bytes, message.version) == (
            first.num_parts,
            first.all_parts_bytes,
            first.version,
        )
        if not is_same or gathered.num_bytes + len(message.piece) > first.all_parts_bytes:
            self._give_up()
            raise MessageError(
                MessageFault.CONTENTS, "parts of a dense update say different things of it"
            )

    def _give_up(self) -> None:
        self.num_given_up += self._gathered is not None
        self._gathered = None


def _identity(message: Message) -> tuple[int, int]:
    """The publisher of a dense update, and the sequence number of its first part."""
    return message.publisher, message.sequence - message.part
