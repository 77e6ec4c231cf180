"""Sends updates of models to Kafka."""

import secrets
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import NamedTuple, Self

import torch
from torch import Tensor

from torchembed.core.checks import check_dim, check_dtype
from torchembed.core.key_partitions import partition_of
from torchembed.streams import dense_tensors, hugectr_messages
from torchembed.streams.message_sender import MessageSender
from torchembed.streams.messages import Message, MessageKind, encode, max_body_bytes, max_rows_in
from torchembed.streams.publisher_options import (
    MessageForm,
    PublisherOptions,
    PublisherStatistics,
)
from torchembed.streams.topics import (
    DENSE,
    HUGECTR,
    ROWS,
    TopicContents,
    check_model_name,
    topic_of,
)
from torchembed.streams.updates import ROW_DTYPES


class _Part(NamedTuple):
    """Keys of one partition, as many as fit into a message."""

    kind: MessageKind
    partition: int
    keys: Tensor
    rows: Tensor


class UpdatePublisher:
    """Sends rows, deletions and dense parts of models to the topics that servers read.

    What a call returns from is in memory, and is sent by threads of librdkafka; :meth:`flush` waits
    until brokers have it on as many replicas as they are set to want. While they are away nothing
    is given up: it is sent on once they are back, each message once and in order. Messages of a key
    are in one partition of the topic of their table. Topics are made by brokers at their first
    message, where these allow it. It is a context manager that closes itself; one thread may use
    it at a time.

    Args:
        brokers: ``host:port``, or several by commas.

    Raises:
        ConnectionError: where no broker answers in time.
    """

    def __init__(self, brokers: str, options: PublisherOptions | None = None) -> None:
        self.options = options or PublisherOptions()
        self.statistics = PublisherStatistics()
        self._sender = MessageSender(brokers, self.options, self.statistics)
        # Not the time, which is the same on ranks that begin at once: updates of one of them would
        # be taken for those of another that came again.
        self._number = secrets.randbelow(2**64 - 1) + 1
        self._sequence = 0

    @property
    def sequence(self) -> int:
        """The sequence number of the last message, 0 before the first."""
        return self._sequence

    @property
    def num_waiting(self) -> int:
        """Number of messages that brokers have not confirmed yet."""
        return self._sender.num_waiting

    def publish_rows(
        self,
        model: str,
        table: str,
        keys: Tensor,
        rows: Tensor,
        *,
        version: int,
        deleted_keys: Tensor | None = None,
    ) -> None:
        """Send rows of a table, and keys that have left it; copies them, and waits for a GPU.

        Where it raises, some of them may be under way; call it again with all.

        Args:
            keys: int64 ``[n]``; of one that comes several times the last row counts.
            rows: ``[n, D]``, float32, float16 or bfloat16.
            version: of the model that the rows belong to; it must not go down.
            deleted_keys: int64 ``[m]``, none of them among ``keys``.

        Raises:
            TypeError, ValueError: for names, tensors or a version that cannot be sent.
            TimeoutError: where the queue stays full, since brokers take nothing.
            DeliveryError: where brokers refused what was sent before.
        """
        self._check(version)
        deleted_keys = keys[:0] if deleted_keys is None else deleted_keys
        for name, tensor in (("keys", keys), ("deleted_keys", deleted_keys)):
            check_dtype(name, tensor, (torch.int64,), "call .long()")
            check_dim(name, tensor, 1)
        check_dtype("rows", rows, ROW_DTYPES, "call .float()")
        if rows.dim() != 2 or len(rows) != len(keys) or not rows.shape[1]:
            raise ValueError(
                f"rows must be [{len(keys)}, D], one for each key, got {tuple(rows.shape)}"
            )
        is_hugectr = self.options.form is MessageForm.HUGECTR
        if is_hugectr and len(deleted_keys):
            raise ValueError(
                "deleted_keys must be empty for HugeCTR, whose messages have no deletions, got "
                f"{len(deleted_keys)}; publish in our own form"
            )
        topic = topic_of(TopicContents(HUGECTR if is_hugectr else ROWS, model, table))
        published_at = time.time_ns() // 1000
        num_partitions = self._sender.partitions_of(topic)
        deleted_keys, no_rows = deleted_keys.cpu(), rows[:0].cpu()
        parts = [
            *self._parts(MessageKind.DELETIONS, deleted_keys, no_rows, num_partitions),
            *self._parts(MessageKind.ROWS, keys.cpu(), rows.detach().cpu(), num_partitions),
        ]
        for number, part in enumerate(parts):
            if is_hugectr:
                key_bytes = self.options.hugectr_key_bytes
                data = hugectr_messages.encode_pairs(part.keys, part.rows.float(), key_bytes)
            else:
                message = Message(
                    kind=part.kind,
                    model=model,
                    table=table,
                    version=version,
                    sequence=self._sequence + 1,
                    publisher=self._number,
                    published_at_micros=published_at,
                    part=number,
                    num_parts=len(parts),
                    keys=part.keys,
                    rows=part.rows,
                )
                data = encode(message)
            self._send(topic, part.partition, data)
        self.statistics.num_rows += len(keys)
        self.statistics.num_deletions += len(deleted_keys)

    def publish_dense(self, model: str, tensors: Mapping[str, Tensor], *, version: int) -> None:
        """Send the dense part of a model, whole; copies it, and waits for a GPU.

        Where it raises, receivers let go of the parts that are under way; call it again.

        Args:
            tensors: by name.
            version: of the model that has them; it must not go down.

        Raises:
            TypeError, ValueError: for names, tensors or a version that cannot be sent.
            TimeoutError: where the queue stays full, since brokers take nothing.
            DeliveryError: where brokers refused what was sent before.
        """
        self._check(version)
        if self.options.form is MessageForm.HUGECTR:
            raise ValueError(
                "form must be MessageForm.TORCHEMBED for dense parts, which HugeCTR has no "
                f"messages for, got {self.options.form}"
            )
        check_model_name(model)
        topic = topic_of(TopicContents(DENSE, model, ""))
        published_at = time.time_ns() // 1000
        data = dense_tensors.to_bytes(tensors)
        piece_bytes = max_body_bytes(self.options.max_message_bytes)
        begins = range(0, len(data), piece_bytes)
        # All parts in one partition, so that they come in order.
        self._sender.partitions_of(topic)
        for number, begin in enumerate(begins):
            message = Message(
                kind=MessageKind.DENSE,
                model=model,
                version=version,
                sequence=self._sequence + 1,
                publisher=self._number,
                published_at_micros=published_at,
                part=number,
                num_parts=len(begins),
                all_parts_bytes=len(data),
                piece=data[begin : begin + piece_bytes],
            )
            self._send(topic, 0, encode(message))
        self.statistics.num_dense_parts += 1

    def flush(self, timeout_seconds: float) -> None:
        """Return once brokers have all that was published.

        Raises:
            TimeoutError: where they have not in time; what is left is sent on.
            DeliveryError: where they refused some of it for good.
        """
        self._sender.flush(timeout_seconds)

    def close(self, timeout_seconds: float = 30.0) -> None:
        """Send what is left, and release the connection; a second call does nothing.

        Raises:
            TimeoutError: where brokers do not take all in time; what is left is lost.
            DeliveryError: where they refused some of it for good.
        """
        self._sender.close(timeout_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check(self, version: int) -> None:
        self._sender.check()
        if not 0 <= version < 2**63:
            raise ValueError(f"version must be an int64 that is not negative, got {version}")

    def _send(self, topic: str, partition: int, data: bytes) -> None:
        self._sender.send(topic, partition, data)
        self._sequence += 1

    def _parts(
        self, kind: MessageKind, keys: Tensor, rows: Tensor, num_partitions: int
    ) -> Iterator[_Part]:
        """``keys`` and ``rows`` by partitions, as many at once as fit into a message."""
        partitions = partition_of(keys, num_partitions)
        order = partitions.argsort(stable=True)
        row_bytes = rows.shape[1] * rows.element_size() if kind is MessageKind.ROWS else 0
        max_rows = max_rows_in(self.options.max_message_bytes, row_bytes)
        if max_rows < 1:
            raise ValueError(
                "max_message_bytes must have place for one row, got "
                f"{self.options.max_message_bytes} for rows of {row_bytes} bytes"
            )
        counts = partitions.bincount(minlength=num_partitions).tolist()
        of_partitions = order.split(counts)
        for partition, chosen in enumerate(of_partitions):
            for places in chosen.split(max_rows) if len(chosen) else ():
                of_part = rows[places] if kind is MessageKind.ROWS else rows
                yield _Part(kind, partition, keys[places], of_part)
