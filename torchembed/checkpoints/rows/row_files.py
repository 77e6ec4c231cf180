"""Safetensors files of rows by key: a tensor for each column, of the same rows."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.checkpoints.files.storage import Storage
from torchembed.checkpoints.files.tensor_file import DTYPES, bytes_of, header_of, read_header
from torchembed.checkpoints.rows.row_source import Column
from torchembed.tables import RowChunk

_STATE = "states."
"""Before the name of an optimizer state, which might be that of another column."""
_CODES = {dtype: code for code, dtype in DTYPES.items()}


class ColumnForm(NamedTuple):
    """Form of a column: what the same columns of all files share."""

    dtype: str
    """The format's name of it."""
    shape: tuple[int, ...]
    """Shape of one row's element; ``()`` is a number."""


class RowFile(NamedTuple):
    """One file: its rows, and what its bytes must be."""

    num_rows: int
    num_bytes: int
    crc32: int


class WrittenRows(NamedTuple):
    """Files and rows that a rank wrote."""

    columns: dict[str, ColumnForm]
    files: dict[str, RowFile]
    """The files of the folder, by name."""


def chunk_of(tensors: Mapping[str, Tensor]) -> RowChunk:
    """The chunk whose columns ``tensors`` are."""
    states = {
        name.removeprefix(_STATE): tensor
        for name, tensor in tensors.items()
        if name.startswith(_STATE)
    }
    return RowChunk(
        tensors["keys"], tensors["rows"], states, tensors.get("scores"), tensors.get("touched")
    )


def columns_of(storage: Storage, path: str, forms: Mapping[str, ColumnForm]) -> dict[str, Column]:
    """Places of a file's columns, as its header gives them.

    Raises:
        ValueError: if the file is cut off, its columns have other dtypes or shapes than
            ``forms``, or other numbers of rows than its keys.
    """
    with storage.create_stream(path, "rb") as stream:
        places = read_header(stream, storage.num_bytes(path), path)  # type: ignore[arg-type]
    if set(places) != set(forms):
        raise ValueError(f"file {path} must hold tensors {sorted(forms)}, got {sorted(places)}")
    num_rows = places["keys"].shape[0] if places["keys"].shape else 0
    columns = {}
    for name, form in forms.items():
        place, dtype, shape = places[name], DTYPES[form.dtype], (num_rows, *form.shape)
        if (place.dtype, place.shape) != (dtype, shape):
            raise ValueError(
                f"file {path} must hold {name} as {dtype} {list(shape)}, got {place.dtype} "
                f"{list(place.shape)}"
            )
        columns[name] = Column(storage, path, num_rows, dtype, form.shape, place.offset)
    return columns


def write_row_files(
    storage: Storage, prefix: str, chunks: Iterable[RowChunk], max_file_bytes: int
) -> WrittenRows | None:
    """Write chunks into files ``<prefix>-<number>.safetensors`` in the root of ``storage``.

    Returns:
        What was written; None where there was no chunk. Chunks without rows give a file without.

    Raises:
        ValueError: for a chunk whose tensors do not belong together, or that differs from the
            first one in its columns.
    """
    writer = None
    for chunk in chunks:
        tensors = _tensors_of(chunk)
        if writer is None:
            writer = _Writer(storage, prefix, tensors, max_file_bytes)
        writer.add(tensors)
    return None if writer is None else writer.finish()


class _Writer:
    """Gathers rows on the CPU until they fill a file."""

    def __init__(
        self, storage: Storage, prefix: str, first: Mapping[str, Tensor], max_file_bytes: int
    ) -> None:
        self._storage = storage
        self._prefix = prefix
        self._written = WrittenRows(_forms(first), {})
        # Readers map files and view bytes as numbers, which must be aligned; with the widest
        # dtypes first every column is.
        self._order = sorted(first, key=lambda name: -first[name].dtype.itemsize)
        row_bytes = sum(DTYPES[f.dtype].itemsize * math.prod(f.shape) for f in self._forms.values())
        self._file_rows = max(max_file_bytes // row_bytes, 1)
        self._pieces: list[Mapping[str, Tensor]] = []
        self._num_rows = 0

    @property
    def _forms(self) -> dict[str, ColumnForm]:
        return self._written.columns

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        forms = _forms(tensors)
        if forms != self._forms:
            raise ValueError(f"chunks must all have columns {self._forms}, got {forms}")
        num_rows, first = len(tensors["keys"]), 0
        while first < num_rows:
            end = min(first + self._file_rows - self._num_rows, num_rows)
            # Copies, since whoever gives chunks may use their memory again.
            piece = {n: t[first:end].detach().to("cpu", copy=True) for n, t in tensors.items()}
            self._pieces.append(piece)
            self._num_rows += end - first
            if self._num_rows == self._file_rows:
                self._write_file()
            first = end

    def finish(self) -> WrittenRows:
        if self._num_rows or not self._written.files:
            self._write_file()
        return self._written

    def _write_file(self) -> None:
        name = f"{self._prefix}-{len(self._written.files):05d}.safetensors"
        path = self._storage.path(name)
        forms = {column: self._forms[column] for column in self._order}
        header = header_of(
            {n: ((self._num_rows, *f.shape), DTYPES[f.dtype]) for n, f in forms.items()}
        )
        with self._storage.create_stream(path, "wb") as stream:
            stream.write(header)
            for column in forms:
                for piece in self._pieces:
                    stream.write(bytes_of(piece[column]))
        num_bytes, crc32 = self._storage.written[path]
        assert crc32 is not None
        self._written.files[name] = RowFile(self._num_rows, num_bytes, crc32)
        self._pieces, self._num_rows = [], 0


def _tensors_of(chunk: RowChunk) -> dict[str, Tensor]:
    """The columns of a chunk by name.

    Raises:
        ValueError: if they are not as :class:`RowChunk` says.
    """
    numbers = {"keys": chunk.keys, "scores": chunk.scores, "touched": chunk.touched}
    tensors = {name: tensor for name, tensor in numbers.items() if tensor is not None}
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int64 or tensor.shape != chunk.keys.shape or tensor.ndim != 1:
            raise ValueError(
                f"{name} of a chunk must be int64 [n] for n rows, got {tensor.dtype} "
                f"{list(tensor.shape)} beside {list(chunk.keys.shape)} keys"
            )
    tensors["rows"] = chunk.rows
    tensors |= {_STATE + name: state for name, state in chunk.states.items()}
    for name in set(tensors) - set(numbers):
        tensor = tensors[name]
        ndims = (2,) if name == "rows" else (1, 2)
        if tensor.ndim not in ndims or len(tensor) != len(chunk.keys) or not all(tensor.shape[1:]):
            raise ValueError(
                f"{name} of a chunk must have a row for each of {len(chunk.keys)} keys, got shape "
                f"{list(tensor.shape)}"
            )
        if tensor.dtype not in _CODES:
            raise ValueError(
                f"{name} must have a dtype that safetensors files know, got {tensor.dtype}"
            )
    return tensors


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, ColumnForm]:
    return {n: ColumnForm(_CODES[t.dtype], tuple(t.shape[1:])) for n, t in tensors.items()}
