"""Turns messages of topics into updates."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from torchembed.streams import dense_tensors, hugectr_messages
from torchembed.streams.dense_gathering import DenseGathering
from torchembed.streams.message_error import MessageError, MessageFault
from torchembed.streams.messages import Message, MessageKind, decode
from torchembed.streams.source_options import SourceOptions, SourceStatistics
from torchembed.streams.topics import DENSE, HUGECTR, TopicContents, contents_of
from torchembed.streams.updates import DenseUpdate, RowUpdate, UpdateOrigin

Update = RowUpdate | DenseUpdate
WidthOf = Callable[[str, str], int | None]
"""The width of the rows of a model's table; None where there is no such table."""


class Received(NamedTuple):
    """A message as a broker gave it."""

    topic: str
    partition: int
    offset: int
    timestamp_seconds: float
    """Since 1970, by the clock of the publisher or of the broker; 0 where none is known."""
    data: bytes


class ReceivedMessages:
    """Reads messages, gathers dense parts, and counts.

    Args:
        width_of: None where rows of any table and width are taken.
    """

    def __init__(
        self, options: SourceOptions, statistics: SourceStatistics, width_of: WidthOf | None
    ) -> None:
        self._options, self._statistics, self._width_of = options, statistics, width_of
        self._dense: dict[tuple[str, int], DenseGathering] = {}

    def update_of(self, received: Received) -> Update | None:
        """The update that a message is, or makes whole; None for a beacon or a part.

        Raises:
            MessageError: for what must be dropped, which is counted.
        """
        self._statistics.num_messages += 1
        self._statistics.num_bytes += len(received.data)
        try:
            update = self._read(received)
        except MessageError as error:
            self._statistics.num_dropped[error.fault] += 1
            raise
        if isinstance(update, RowUpdate):
            self._statistics.num_rows += len(update.keys)
            self._statistics.num_deletions += len(update.deleted_keys)
        self._statistics.num_dense_parts += isinstance(update, DenseUpdate)
        return update

    def first_needed(self, topic: str, partition: int) -> int | None:
        """The offset from which on messages must be read again after a restart, since parts of a
        dense update are missing; None where none are."""
        gathering = self._dense.get((topic, partition))
        return None if gathering is None else gathering.first_offset

    def forget(self, topic: str, partition: int) -> None:
        """Let go of parts of dense updates of a partition that another instance reads now."""
        self._dense.pop((topic, partition), None)

    def _read(self, received: Received) -> Update | None:
        contents = contents_of(received.topic)
        if contents is None:
            raise MessageError(MessageFault.TOPIC, f"topic {received.topic} is of no model")
        if contents.kind == HUGECTR:
            return self._hugectr_rows(contents, received)
        message = decode(received.data)
        is_dense = contents.kind == DENSE
        if (message.model, message.table) != (contents.model, contents.table) or is_dense != (
            message.kind is MessageKind.DENSE
        ):
            raise MessageError(
                MessageFault.TOPIC,
                f"a message of {message.kind} of model {message.model!r} and table "
                f"{message.table!r} came in topic {received.topic}",
            )
        if is_dense:
            return self._dense_update(message, received)
        is_rows = message.kind is MessageKind.ROWS
        self._check_table(contents, message.rows.shape[1] if is_rows else None)
        none = torch.empty(0, dtype=torch.int64)
        return RowUpdate(
            model=message.model,
            table=message.table,
            version=message.version,
            sequence=message.sequence,
            keys=message.keys if is_rows else none,
            rows=message.rows,
            deleted_keys=none if is_rows else message.keys,
            origin=_origin(message, received),
        )

    def _check_table(self, contents: TopicContents, width: int | None) -> None:
        if self._width_of is None:
            return
        expected = self._width_of(contents.model, contents.table)
        if expected is None:
            raise MessageError(
                MessageFault.TABLE, f"model {contents.model} has no table {contents.table}"
            )
        if width not in (None, expected):
            raise MessageError(
                MessageFault.WIDTH,
                f"rows of {contents.model}/{contents.table} must have width {expected}, got "
                f"{width}",
            )

    def _dense_update(self, message: Message, received: Received) -> DenseUpdate | None:
        place = received.topic, received.partition
        gathering = self._dense.setdefault(place, DenseGathering(self._options.max_dense_bytes))
        num_given_up = gathering.num_given_up
        try:
            data = gathering.add(message, received.offset)
        finally:
            if gathering.num_given_up > num_given_up:
                self._statistics.num_dropped[MessageFault.INCOMPLETE] += 1
        if data is None:
            return None
        return DenseUpdate(
            model=message.model,
            version=message.version,
            sequence=message.sequence,
            tensors=dense_tensors.from_bytes(data),
            origin=_origin(message, received),
        )

    def _hugectr_rows(self, contents: TopicContents, received: Received) -> RowUpdate | None:
        keys, rows = hugectr_messages.decode_pairs(received.data, self._options.hugectr_key_bytes)
        if not len(keys):
            self._statistics.num_beacons += 1
            return None
        self._check_table(contents, rows.shape[1])
        return RowUpdate(
            model=contents.model,
            table=contents.table,
            version=0,
            sequence=received.offset + 1,
            keys=keys,
            rows=rows,
            deleted_keys=torch.empty(0, dtype=torch.int64),
            origin=UpdateOrigin(
                partition=received.partition, published_at=received.timestamp_seconds
            ),
        )


def _origin(message: Message, received: Received) -> UpdateOrigin:
    return UpdateOrigin(
        publisher=message.publisher,
        partition=received.partition,
        published_at=message.published_at_micros / 1e6,
    )
