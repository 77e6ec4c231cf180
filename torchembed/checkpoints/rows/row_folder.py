"""Folders of rows by key as safetensors: divided into files by size, with an index."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from torchembed.checkpoints.files.atomic_folder import AtomicFolder, unfinished
from torchembed.checkpoints.files.checked_json import from_checked_json, to_checked_json
from torchembed.checkpoints.files.in_threads import in_threads
from torchembed.checkpoints.files.storage import FileDigest, Storage
from torchembed.checkpoints.rows.row_files import (
    ColumnForm,
    RowFile,
    WrittenRows,
    chunk_of,
    columns_of,
    write_row_files,
)
from torchembed.checkpoints.rows.row_source import CHUNK_BYTES, RowSource, source_of_columns
from torchembed.core import ranks
from torchembed.core.ranks.collective_errors import decide_on_first_rank, raise_on_all_ranks
from torchembed.tables import RowChunk

INDEX = "rows.safetensors.index.json"
_OURS = re.compile(rf"rows-\d+-\d+\.safetensors|{re.escape(unfinished(INDEX))}")


class FolderIndex(NamedTuple):
    """Content of a folder's last file: what the others must hold."""

    columns: dict[str, ColumnForm]
    """Tensors of each file, by name."""
    files: dict[str, RowFile]

    def to_bytes(self) -> bytes:
        """The file's content: JSON, with a checksum of itself."""
        return to_checked_json(self._asdict())

    @classmethod
    def parse(cls, content: bytes) -> "FolderIndex":
        """The index that the file's content describes.

        Raises:
            ValueError: if the content was changed or cut off since it was written.
        """
        try:
            fields = from_checked_json(content)
            columns = {k: ColumnForm(d, tuple(s)) for k, (d, s) in fields["columns"].items()}
            files = {name: RowFile(*file) for name, file in fields["files"].items()}
            return cls(columns, files)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"index is not as it was written: {error}") from None


def export_rows(
    chunks: Iterable[RowChunk], path: str | Path, *, max_file_bytes: int = 1 << 30
) -> None:
    """Write rows of one table, by key, into a folder of safetensors files.

    Each file holds tensors ``keys``, int64 ``[n]``, and ``rows [n, D]``; where chunks have them,
    ``scores`` and ``touched``, int64 ``[n]``, and optimizer states as ``states.<name>``. Other
    libraries read them as they stand. The last file, an index with every file's size and CRC-32, is
    put in its place in one atomic step: without it, :func:`open_rows` finds nothing. Every rank
    writes the rows that it holds; a key may come once over all ranks. Collective.

    Args:
        chunks: this rank's. All have the same columns and dtypes. Their tensors are copied, on any
            device, before the next chunk is asked for.
        path: a folder, or a URL that fsspec knows, that holds nothing yet, or what such a call left
            that did not come to its end.
        max_file_bytes: of the tensors in a file, about, which each rank keeps in memory until it
            writes them.

    Raises:
        FileExistsError: if ``path`` holds anything else.
        OSError: if writing fails.
        ValueError: for chunks that differ in their columns or are not as :class:`RowChunk` says,
            and where no rank gives a chunk, though it had no rows.
    """
    if max_file_bytes < 1:
        raise ValueError(f"max_file_bytes must be positive, got {max_file_bytes}")
    what = f"export rows to {path}"
    storage = Storage(path)
    folder = AtomicFolder(storage, storage.root.rstrip("/"), INDEX)

    def begin() -> str:
        _clear(storage)
        return folder.begin()

    token = decide_on_first_rank(begin, what)
    raise_on_all_ranks(lambda: folder.check_token(token), what)
    prefix = f"rows-{ranks.rank():05d}"
    written = raise_on_all_ranks(
        lambda: write_row_files(storage, prefix, chunks, max_file_bytes), what
    )
    of_all = [rows for rows in ranks.gather_objects(written) if rows is not None]

    def end() -> None:
        index = _index_of(of_all)
        if not folder.has_token(token):
            raise RuntimeError(
                f"one run at a time may write to {path}, and another one has; remove the folder "
                "and export again"
            )
        folder.complete(index.to_bytes())

    decide_on_first_rank(end, what)


def _clear(storage: Storage) -> None:
    """Remove what an export left that did not come to its end.

    Raises:
        FileExistsError: if there is anything else.
    """
    names = storage.names()
    foreign = [name for name in names if not _OURS.fullmatch(name)]
    if foreign:
        raise FileExistsError(
            f"path must be a folder that holds nothing yet, and {storage.url} holds {foreign[0]}; "
            "remove it, or choose another folder"
        )
    for name in names:
        storage.remove(storage.path(name))


def _index_of(of_all: list[WrittenRows]) -> FolderIndex:
    if not of_all:
        raise ValueError("chunks must be at least one, on any rank, which may have no rows")
    columns = of_all[0].columns
    for written in of_all:
        if written.columns != columns:
            raise ValueError(
                f"chunks must have the same columns on all ranks, got {columns} and "
                f"{written.columns}"
            )
    files = {name: file for written in of_all for name, file in written.files.items()}
    return FolderIndex(columns, files)


def open_rows(path: str | Path, *, chunk_bytes: int = CHUNK_BYTES) -> RowSource:
    """Rows that :func:`export_rows` wrote, checked as a whole before the first one is read.

    Any process may call it, at any time. Files are read twice, once for their checksums, and keys
    once more; memory is needed for a chunk of rows, and about 1 GiB for keys.

    Args:
        path: the folder, or its URL.
        chunk_bytes: of a chunk's tensors, at most, unless a row is larger.

    Raises:
        FileNotFoundError: if there is no finished folder, or a file is missing.
        ValueError: if a file is not as it was written, and names it; or a key stands there more
            than once.
    """
    storage = Storage(path)
    index = _read_index(storage)
    in_threads(lambda name: _check_file(storage, name, index), list(index.files))
    parts = [columns_of(storage, storage.path(name), index.columns) for name in index.files]
    what = f"folder {storage.url}"
    return source_of_columns(parts, chunk_of, what=what, chunk_bytes=chunk_bytes)


def _read_index(storage: Storage) -> FolderIndex:
    path = storage.path(INDEX)
    if not storage.exists(path):
        raise FileNotFoundError(
            f"{storage.url} must be a folder of rows with the file {INDEX}, and has none; an "
            "export that did not come to its end leaves none"
        )
    try:
        return FolderIndex.parse(storage.read(path))
    except ValueError as error:
        raise ValueError(f"file {path} is corrupt: export again ({error})") from None


def _check_file(storage: Storage, name: str, index: FolderIndex) -> None:
    path, wanted = storage.path(name), index.files[name]
    if not storage.exists(path):
        raise FileNotFoundError(f"folder {storage.url} lacks its file {name}")
    # The header first: it says more clearly than a checksum what is wrong with another file.
    num_rows = columns_of(storage, path, index.columns)["keys"].num_rows
    if num_rows != wanted.num_rows:
        raise ValueError(f"file {path} must hold {wanted.num_rows} rows, got {num_rows}")
    storage.check_unchanged(path, FileDigest(wanted.num_bytes, wanted.crc32), "export again")
