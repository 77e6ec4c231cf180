"""Messages of updates, format 2: a header of fixed size, names, and what is to be changed.

All numbers are little-endian.
"""

import enum
import struct
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from torchembed.core.checks import check_dtype
from torchembed.streams.message_error import MessageError, MessageFault
from torchembed.streams.raw_tensors import bytes_of, tensor_of
from torchembed.streams.topics import MAX_NAME_CHARACTERS
from torchembed.streams.updates import ROW_DTYPES

MAGIC = b"TEMB"
FORMAT = 2
# Behind magic and checksum, over which none is computed: format, kind, dtype, width, count,
# version, sequence, publisher, published at, part, number of parts, bytes of all parts, and the
# lengths of two names.
_FIELDS = struct.Struct("<HBBIIqQQQIIQHH")
_START = struct.Struct("<4sI")
HEADER_BYTES = _START.size + _FIELDS.size
_KEY_BYTES = 8


class MessageKind(enum.Enum):
    """The operation of a message."""

    ROWS = 1
    """Give keys their rows."""
    DELETIONS = 2
    """Take keys and their rows away."""
    DENSE = 3
    """A part of the bytes that :func:`~torchembed.streams.dense_tensors.to_bytes` gave."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message as it is sent; the fields that its kind does not use are empty."""

    kind: MessageKind
    model: str
    table: str = ""
    version: int
    sequence: int
    publisher: int
    published_at_micros: int
    """Since 1970."""
    part: int = 0
    """Which of ``num_parts`` it is, from 0 on, of what was published by one call."""
    num_parts: int = 1
    all_parts_bytes: int = 0
    """Of a dense part."""
    keys: Tensor = torch.empty(0, dtype=torch.int64)
    """int64 ``[n]``."""
    rows: Tensor = torch.empty(0, 0)
    """``[n, D]``."""
    piece: bytes = b""
    """Of a dense part."""


def max_body_bytes(message_bytes: int) -> int:
    """Number of bytes of keys and rows, or of a dense part, that fit beside the longest names."""
    return message_bytes - HEADER_BYTES - 2 * MAX_NAME_CHARACTERS


def max_rows_in(message_bytes: int, row_bytes: int) -> int:
    """Number of keys and rows that fit into a message."""
    return max_body_bytes(message_bytes) // (_KEY_BYTES + row_bytes)


def encode(message: Message) -> bytes:
    """The bytes of a message.

    Raises:
        TypeError: for keys or rows of another dtype.
        ValueError: for keys and rows that do not fit each other.
    """
    check_dtype("keys", message.keys, (torch.int64,), "call .long()")
    check_dtype("rows", message.rows, ROW_DTYPES, "call .float()")
    width, dtype = message.rows.shape[1], ROW_DTYPES.index(message.rows.dtype)
    body = [bytes_of(message.keys)]
    count = len(message.keys)
    if message.kind is MessageKind.ROWS:
        if len(message.rows) != count:
            raise ValueError(f"rows must be {count}, one for each key, got {len(message.rows)}")
        body.append(bytes_of(message.rows))
    elif message.kind is MessageKind.DENSE:
        body, count = [message.piece], len(message.piece)
    names = [message.model.encode(), message.table.encode()]
    fields = _FIELDS.pack(
        FORMAT,
        message.kind.value,
        dtype,
        width,
        count,
        message.version,
        message.sequence,
        message.publisher,
        message.published_at_micros,
        message.part,
        message.num_parts,
        message.all_parts_bytes,
        *map(len, names),
    )
    rest = b"".join([fields, *names, *body])
    return _START.pack(MAGIC, zlib.crc32(rest)) + rest


def decode(data: bytes) -> Message:
    """The message that ``data`` is; the inverse of :func:`encode`.

    Raises:
        MessageError: where it is none; the fault says why.
    """
    if len(data) < HEADER_BYTES:
        fault = MessageFault.TRUNCATED if MAGIC.startswith(data[:4]) else MessageFault.MAGIC
        raise MessageError(fault, f"a message must have {HEADER_BYTES} bytes, got {len(data)}")
    magic, checksum = _START.unpack_from(data)
    if magic != MAGIC:
        raise MessageError(MessageFault.MAGIC, f"a message must begin with {MAGIC!r}, got {magic}")
    fields = _FIELDS.unpack_from(data, _START.size)
    if fields[0] != FORMAT:
        raise MessageError(
            MessageFault.FORMAT, f"the format must be {FORMAT}, got {fields[0]}; update the reader"
        )
    _check_length(data, fields)
    if zlib.crc32(memoryview(data)[_START.size :]) != checksum:
        raise MessageError(MessageFault.CHECKSUM, "a message is not as it was written")
    try:
        return _message(data, fields)
    except (UnicodeDecodeError, ValueError, IndexError) as error:
        raise MessageError(MessageFault.CONTENTS, f"a message has a wrong field: {error}") from None


def _check_length(data: bytes, fields: tuple[int, ...]) -> None:
    """Raise where ``data`` is shorter or longer than its fields say, whatever numbers they have."""
    _, kind, dtype, width, count, *_, model_bytes, table_bytes = fields
    body_bytes = count
    if kind != MessageKind.DENSE.value:
        item_bytes = ROW_DTYPES[dtype].itemsize if dtype < len(ROW_DTYPES) else 1
        of_row = width * item_bytes if kind == MessageKind.ROWS.value else 0
        body_bytes = count * (_KEY_BYTES + of_row)
    expected = HEADER_BYTES + model_bytes + table_bytes + body_bytes
    if len(data) != expected:
        fault = MessageFault.TRUNCATED if len(data) < expected else MessageFault.TRAILING
        raise MessageError(fault, f"a message of {expected} bytes has {len(data)}")


def _message(data: bytes, fields: tuple[int, ...]) -> Message:
    _, kind, dtype, width, count, *numbers, model_bytes, table_bytes = fields
    version, sequence, publisher, published_at, part, num_parts, all_parts_bytes = numbers
    begin = HEADER_BYTES + model_bytes
    body = begin + table_bytes
    kind, row_dtype = MessageKind(kind), ROW_DTYPES[dtype]
    if part >= num_parts:
        raise ValueError(f"part {part} of {num_parts}")
    if not 0 < sequence < 2**63 or version < 0:
        raise ValueError(f"sequence {sequence}, version {version}")
    if kind is MessageKind.ROWS and not width:
        raise ValueError(f"rows of width {width}")
    keys, rows, piece = torch.empty(0, dtype=torch.int64), torch.empty(0, width), b""
    if kind is MessageKind.DENSE:
        piece = data[body:]
        if count > all_parts_bytes:
            raise ValueError(f"a part of {count} of {all_parts_bytes} bytes")
    else:
        rows_at = body + count * _KEY_BYTES
        keys = tensor_of(data[body:rows_at], torch.int64)
        if kind is MessageKind.ROWS:
            rows = tensor_of(data[rows_at:], row_dtype).view(count, width)
    return Message(
        kind=kind,
        model=data[HEADER_BYTES:begin].decode(),
        table=data[begin:body].decode(),
        version=version,
        sequence=sequence,
        publisher=publisher,
        published_at_micros=published_at,
        part=part,
        num_parts=num_parts,
        all_parts_bytes=all_parts_bytes,
        keys=keys,
        rows=rows,
        piece=piece,
    )
