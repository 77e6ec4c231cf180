"""Rows by key, out of columns of files: safetensors files of ours, and raw files of others."""

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, NamedTuple

import torch
from torch import Tensor

from torchembed.checkpoints.files.storage import Storage
from torchembed.checkpoints.rows.distinct_keys import check_distinct
from torchembed.ops.hash_table import int64_keys
from torchembed.tables import RowChunk, row_ranges

CHUNK_BYTES = 1 << 26
"""Size of the chunks in which rows are read, where the caller asks for no other."""


@dataclass(frozen=True, kw_only=True)
class RowSource:
    """Rows of one table by key, each key once. Iterating reads them anew, in chunks.

    Chunks are on the CPU, and own their memory. At least one comes, which may have no rows.
    """

    num_rows: int
    embedding_dim: int
    chunks: Callable[[], Iterator[RowChunk]]
    """Begins anew with each call."""

    def __iter__(self) -> Iterator[RowChunk]:
        return self.chunks()


class Column(NamedTuple):
    """Consecutive rows in a file: row-major, little-endian, from byte ``offset`` on."""

    storage: Storage
    path: str
    num_rows: int
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    """Shape of one row's element; ``()`` is a number."""
    offset: int = 0

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Columns = Mapping[str, Column]
"""Columns by name that hold the same rows, each its part of them; ``keys`` are among them."""


def raw_column(
    storage: Storage, path: str, dtype: torch.dtype, shape: tuple[int, ...] = (), offset: int = 0
) -> Column:
    """The column that a whole file is, but for the first ``offset`` bytes.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if its size is not that of a number of rows.
    """
    num_bytes = storage.num_bytes(path) - offset
    column = Column(storage, path, 0, dtype, shape, offset)
    num_rows, rest = divmod(num_bytes, column.row_bytes)
    if num_bytes < 0 or rest:
        behind = f" behind the first {offset}" if offset else ""
        raise ValueError(
            f"file {path} must have a multiple of {column.row_bytes} bytes{behind}, as rows of "
            f"{math.prod(shape)} {dtype} have, got {num_bytes}; it is cut off, or of another dtype "
            "or width"
        )
    return column._replace(num_rows=num_rows)


def check_lengths(parts: Sequence[Columns]) -> None:
    """Raise ``ValueError`` where the columns of a part are of different lengths."""
    for columns in parts:
        keys = columns["keys"]
        for name, column in columns.items():
            if column.num_rows != keys.num_rows:
                raise ValueError(
                    f"file {column.path} must hold {name} for {keys.num_rows} keys, as many as "
                    f"{keys.path} has, got {column.num_rows}"
                )


def check_columns(parts: Sequence[Columns], what: str, chunk_bytes: int) -> int:
    """Check that the columns of each part are of equal lengths, and that keys are distinct.

    Args:
        what: names all parts together, for errors.
        chunk_bytes: of the keys that are read at a time.

    Returns:
        The number of rows of all parts.

    Raises:
        ValueError: if lengths differ, or a key stands there more than once.
    """
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be at least 1, got {chunk_bytes}")
    check_lengths(parts)

    def keys_alone() -> Iterator[tuple[str, Tensor]]:
        for columns in parts:
            only = {"keys": columns["keys"]}
            for tensors in read_columns([only], chunk_bytes):
                yield only["keys"].path, tensors["keys"]

    num_rows = sum(columns["keys"].num_rows for columns in parts)
    check_distinct(keys_alone, num_rows, what)
    return num_rows


def read_columns(parts: Sequence[Columns], chunk_bytes: int) -> Iterator[dict[str, Tensor]]:
    """The columns of all parts, some rows at a time; a part without rows gives one chunk without.

    ``keys`` are int64: those of 32 bits keep their values, unsigned ones of 64 their bits.

    Args:
        chunk_bytes: of a chunk's tensors, at most, unless a row is larger.
    """
    for columns in parts:
        row_bytes = sum(column.row_bytes for column in columns.values())
        num_rows = columns["keys"].num_rows
        with ExitStack() as stack:
            streams = {
                name: stack.enter_context(column.storage.create_stream(column.path, "rb"))
                for name, column in columns.items()
            }
            for rows in row_ranges(num_rows, row_bytes, chunk_bytes) if num_rows else [range(0)]:
                tensors = {name: _read(streams[name], columns[name], rows) for name in columns}
                yield tensors | {"keys": int64_keys(tensors["keys"])}


def source_of_columns(
    parts: Sequence[Columns],
    chunk_of: Callable[[Mapping[str, Tensor]], RowChunk],
    *,
    what: str,
    chunk_bytes: int,
) -> RowSource:
    """Rows in columns, checked by :func:`check_columns`.

    Args:
        parts: at least one; each has the columns ``keys`` and ``rows``.
        chunk_of: a chunk of tensors by column, as :func:`read_columns` gives them.
        what, chunk_bytes: as for the two.
    """
    num_rows = check_columns(parts, what, chunk_bytes)
    (embedding_dim,) = parts[0]["rows"].shape
    return RowSource(
        num_rows=num_rows,
        embedding_dim=embedding_dim,
        chunks=lambda: map(chunk_of, read_columns(parts, chunk_bytes)),
    )


def _read(stream: IO[bytes] | io.IOBase, column: Column, rows: range) -> Tensor:
    if not rows:
        return torch.empty(0, *column.shape, dtype=column.dtype)
    stream.seek(column.offset + rows.start * column.row_bytes)
    data = bytearray(len(rows) * column.row_bytes)
    num_read, view = 0, memoryview(data)
    while num_read < len(data):
        num_more = stream.readinto(view[num_read:])  # type: ignore[union-attr]
        if not num_more:
            raise ValueError(f"file {column.path} was cut off while its rows were read")
        num_read += num_more
    return torch.frombuffer(data, dtype=column.dtype).reshape(len(rows), *column.shape)
