"""Dumps of the Sparse Operation Kit (SOK) as rows by key.

``sok.dump`` writes ``<table>-key``, ``<table>-weight`` and, for each slot of the optimizer,
``<table>-<optimizer>-<slot>``: a head of 296 bytes, then the numbers, little-endian, in the same
order of rows. In the table's name, punctuation is ``_``. The head: 256 bytes with the table's name;
what the file holds, as a big-endian number of 32 bits; 32 bytes with the slot's name; the dtype,
likewise a number. Names are padded with spaces on the left, and the table's is often empty.
"""

import enum
import string
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.checkpoints.files.storage import Storage
from torchembed.checkpoints.rows.row_source import (
    CHUNK_BYTES,
    Column,
    RowSource,
    raw_column,
    source_of_columns,
)
from torchembed.tables import RowChunk

_HEAD_BYTES = 296
_DTYPES = (
    torch.int32,
    torch.int64,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.float32,
    torch.float64,
)
"""The dtypes, by their numbers in heads."""
_KEYS, _FLOATS = _DTYPES[:4], _DTYPES[4:]
STATES = {
    "SGD": {},
    "Adagrad": {"sum": "accumulator"},
    "Adam": {"exp_avg": "m", "exp_avg_sq": "v"},
}
"""The slots of each optimizer of SOK, by the names of the same states here."""


class _Kind(enum.IntEnum):
    """Content of a file."""

    KEYS = 0
    ROWS = 1
    STATE = 2


class _Head(NamedTuple):
    kind: int
    slot: str
    dtype: int


def open_sok_rows(
    path: str | Path,
    table: str,
    *,
    embedding_dim: int,
    optimizer: str | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> RowSource:
    """Rows of a table that ``sok.dump`` wrote, checked before the first one is read.

    Keys of 32 bits keep their values, unsigned ones of 64 their bits. Rows keep their dtype, states
    become float32.

    Args:
        path: the folder of the dump, or a URL that fsspec knows.
        table: name of the variable, or as it stands in the names of its files.
        embedding_dim: columns of a row.
        optimizer: whose states are read, as in the names of their files: ``Adagrad``, ``Adam`` or
            ``SGD``, which has none; None reads none.
        chunk_bytes: of a chunk's tensors, at most, unless a row is larger.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: for another optimizer; where a file is of another kind or dtype than its name
            says, sizes do not fit together, or a key stands there more than once.
    """
    if embedding_dim < 1:
        raise ValueError(f"embedding_dim must be at least 1, got {embedding_dim}")
    if optimizer is not None and optimizer not in STATES:
        raise ValueError(f"optimizer must be among {list(STATES)}, or None, got {optimizer!r}")
    storage = Storage(path)
    name = "".join("_" if letter in string.punctuation else letter for letter in table)
    shape = (embedding_dim,)
    keys = _column(storage, f"{name}-key", _Kind.KEYS)
    rows = _column(storage, f"{name}-weight", _Kind.ROWS, shape=shape)
    columns = {"keys": keys, "rows": rows}
    slots = {} if optimizer is None else STATES[optimizer]
    for state, slot in slots.items():
        column = _column(storage, f"{name}-{optimizer}-{slot}", _Kind.STATE, slot, shape)
        if column.dtype != rows.dtype:
            # SOK divides files by bytes where it gathers them, so that the rows of wider states
            # may come in another order; its own loader refuses them, too.
            raise ValueError(
                f"file {column.path} must hold {rows.dtype} as {rows.path} does, got "
                f"{column.dtype}; dump the table in float32"
            )
        columns[state] = column

    def chunk_of(tensors: Mapping[str, Tensor]) -> RowChunk:
        states = {state: tensors[state].float() for state in slots}
        return RowChunk(tensors["keys"], tensors["rows"], states)

    what = f"table {name} in {storage.url}"
    return source_of_columns([columns], chunk_of, what=what, chunk_bytes=chunk_bytes)


def _column(
    storage: Storage, name: str, kind: _Kind, slot: str = "", shape: tuple[int, ...] = ()
) -> Column:
    path = storage.path(name)
    if not storage.exists(path):
        raise FileNotFoundError(f"folder {storage.url} must hold the file {name}, and has none")
    head = _read_head(storage, path)
    if (head.kind, head.slot) != (kind, slot):
        raise ValueError(
            f"file {path} must say that it holds {kind.name} (kind {kind}, slot {slot!r}), got "
            f"kind {head.kind} and slot {head.slot!r}"
        )
    dtypes = _KEYS if kind is _Kind.KEYS else _FLOATS
    dtype = _DTYPES[head.dtype] if head.dtype < len(_DTYPES) else None
    if dtype is None or dtype not in dtypes:
        raise ValueError(
            f"file {path} must hold {kind.name} of one of {[str(d) for d in dtypes]}, got "
            f"{dtype or 'an unknown dtype'} (number {head.dtype})"
        )
    return raw_column(storage, path, dtype, shape, _HEAD_BYTES)


def _read_head(storage: Storage, path: str) -> _Head:
    with storage.create_stream(path, "rb") as stream:
        head = stream.read(_HEAD_BYTES)  # type: ignore[attr-defined]
    if len(head) < _HEAD_BYTES:
        raise ValueError(
            f"file {path} must begin with a head of {_HEAD_BYTES} bytes, got {len(head)} bytes"
        )
    slot = head[260:292].decode(errors="replace").strip()
    return _Head(int.from_bytes(head[256:260], "big"), slot, int.from_bytes(head[292:], "big"))
