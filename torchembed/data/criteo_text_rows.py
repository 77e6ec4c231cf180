"""Rows of Criteo's text files as arrays: a pattern checks them, and polars reads the numbers."""

import contextlib
import gzip
import io
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import islice
from typing import IO, NamedTuple, NoReturn, TextIO

import numpy as np
from numpy.typing import NDArray

from torchembed.data.criteo import CAT_NAMES, INT_NAMES
from torchembed.data.data_path import DataPath, is_remote
from torchembed.data.source import FileRows

COLUMN_NAMES = ("label", *INT_NAMES, *CAT_NAMES)
NUM_COLUMNS = len(COLUMN_NAMES)

_LABEL, _COUNT, _ID = "[01]", "(-?[0-9]{1,15})?", "[0-9a-fA-F]{0,8}"
_ROW = rf"^{_LABEL}(\t{_COUNT}){{{len(INT_NAMES)}}}(\t{_ID}){{{len(CAT_NAMES)}}}\n?$"
_FIELDS = (
    (_LABEL, "0 or 1"),
    *[(_COUNT, "an integer of at most 15 digits, or empty")] * len(INT_NAMES),
    *[(_ID, "a hexadecimal id of at most 8 digits, or empty")] * len(CAT_NAMES),
)
"""A pattern for each column, and what it requires, in words."""
_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK_BYTES = 4 << 20
_REMOTE_BLOCK_BYTES = 4 << 20
"""Text that is asked for at once of a file behind a URL."""
_MAX_ROW_CHARACTERS = 1 << 16


class TextRows(NamedTuple):
    """Whole rows of one file."""

    path: DataPath
    first_row: int
    """Position of the first of them in the file, from 0."""
    lines: list[str]
    """Each ends in a newline, but perhaps the file's last."""


class CriteoRows(NamedTuple):
    """Rows as numbers; a missing count is 0."""

    labels: NDArray[np.float32]
    """``[rows]``, 0 or 1."""
    counts: NDArray[np.int64]
    """``[rows, 13]``."""
    ids: NDArray[np.int64]
    """``[rows, 26]``, in ``[0, 2**32)`` or the number of a missing id."""


def _opened(path: DataPath) -> io.BufferedReader:
    """A file, read from its beginning on; a remote one a block at a time, as it is asked for."""
    if not is_remote(path):
        return path.open("rb")
    # Some servers give their files as one stream, in which nobody can go back.
    return io.BufferedReader(path.open("rb", block_size=_REMOTE_BLOCK_BYTES))  # type: ignore[arg-type]


@contextlib.contextmanager
def _decompressed(path: DataPath) -> Iterator[IO[bytes]]:
    """The decompressed text of ``path``; gzip is known by its first bytes.

    Raises:
        ValueError: inside the context, where a compressed file is cut off or damaged.
    """
    with _opened(path) as file:
        is_compressed = file.peek(2)[:2] == _GZIP_MAGIC
        try:
            yield gzip.GzipFile(fileobj=file) if is_compressed else file  # type: ignore[misc]
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(
                f"{path}: the compressed file is cut off or damaged before its byte {file.tell()} "
                f"({error}); fetch it again"
            ) from error


def _raise_empty(path: DataPath) -> NoReturn:
    raise ValueError(f"{path} is empty; it must hold rows of {NUM_COLUMNS} columns")


def count_rows(path: DataPath) -> int:
    """Rows of a text file, by one pass over it; remembered until the file changes.

    Raises:
        ValueError: if the file is empty, or a compressed one is cut off or damaged.
    """
    if is_remote(path):
        return _count_rows(path, path.fs.size(path.path), path.fs.ukey(path.path))
    status = path.stat()
    return _count_rows(path, status.st_size, status.st_mtime_ns)


@lru_cache
def _count_rows(path: DataPath, _size: int | None, _state: int | str) -> int:
    num_rows, last = 0, b""
    with _decompressed(path) as text:
        while chunk := text.read(_CHUNK_BYTES):
            num_rows += chunk.count(b"\n")
            last = chunk[-1:]
    if not last:
        _raise_empty(path)
    return num_rows + (last != b"\n")


def row_blocks(
    files: Sequence[FileRows], block_rows: int, num_skipped: int = 0
) -> Iterator[list[TextRows]]:
    """Blocks of ``block_rows`` rows and what is left; one may run from a file into the next.

    The first ``num_skipped`` rows of all are left out.

    Raises:
        ValueError: if a file is empty, a compressed one is cut off or damaged, or a row does not
            end.
    """
    block: list[TextRows] = []
    missing = block_rows
    for path, start, stop in files:
        with (
            _decompressed(path) as text,
            io.TextIOWrapper(text, "utf-8", "replace", "\n") as decoded,
        ):
            lines = _lines(path, decoded)
            end = sys.maxsize if stop is None else stop
            row = _skip(lines, start)
            skipped = _skip(lines, min(num_skipped, end - row))
            row += skipped
            num_skipped -= skipped
            while taken := list(islice(lines, min(missing, end - row))):
                block.append(TextRows(path, row, taken))
                row += len(taken)
                missing -= len(taken)
                if not missing:
                    yield block
                    block, missing = [], block_rows
        if not row:
            _raise_empty(path)
    if block:
        yield block


def _lines(path: DataPath, text: TextIO) -> Iterator[str]:
    # With a limit, so that a file without newlines is not read into one string.
    limited = iter(partial(text.readline, _MAX_ROW_CHARACTERS), "")
    for row, line in enumerate(limited, 1):
        if len(line) == _MAX_ROW_CHARACTERS:
            raise ValueError(
                f"{path}, row {row}: goes on for {len(line)} characters or more; it must have "
                f"{NUM_COLUMNS} columns and end in a newline"
            )
        yield line


def _skip(lines: Iterator[str], num_rows: int) -> int:
    """Take ``num_rows`` lines, or all that are left; returns how many there were."""
    return sum(1 for _ in islice(lines, num_rows))


def parse_block(block: Sequence[TextRows], missing_id: int = 0) -> CriteoRows:
    """The numbers of all rows of a block, as :func:`parse_rows` gives them, and raises."""
    parts = [parse_rows(rows, missing_id) for rows in block]
    return CriteoRows(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def parse_rows(rows: TextRows, missing_id: int = 0) -> CriteoRows:
    """The numbers of ``rows``.

    Args:
        rows: of one file.
        missing_id: the id where there is none, int64.

    Raises:
        ImportError: if polars is not installed.
        ValueError: names the file, the row (from 1), the column and what came, where a row has not
            40 columns, a label is not 0 or 1, a count is not a decimal integer of at most 15
            digits, or an id is not a hexadecimal one of at most 8 digits.
    """
    try:
        import polars as pl
    except ImportError as error:
        raise ImportError(
            f"{rows.path}: reading Criteo's text needs polars; pip install polars"
        ) from error

    is_good = pl.Series(rows.lines).str.contains(_ROW)
    # polars fills short rows up and skips empty ones, so that none but good ones may come to it.
    if not is_good.all():
        _raise_bad_row(rows, is_good.to_list().index(False))
    types = [pl.Float32, *[pl.Int64] * len(INT_NAMES), *[pl.String] * len(CAT_NAMES)]
    table = pl.read_csv(
        "".join(rows.lines).encode(),
        has_header=False,
        separator="\t",
        quote_char=None,
        schema=dict(zip(COLUMN_NAMES, types, strict=True)),
    )
    ids = pl.col(CAT_NAMES).str.to_integer(base=16)
    return CriteoRows(
        table["label"].to_numpy(),
        table.select(pl.col(INT_NAMES).fill_null(0)).to_numpy(),
        table.select(ids.fill_null(missing_id)).to_numpy(),
    )


def _raise_bad_row(rows: TextRows, position: int) -> NoReturn:
    where = f"{rows.path}, row {rows.first_row + position + 1}"
    line = rows.lines[position].removesuffix("\n")
    fields = line.split("\t")
    if len(fields) != NUM_COLUMNS:
        raise ValueError(
            f"{where}: must have {NUM_COLUMNS} tab-separated columns (label, {len(INT_NAMES)} "
            f"integers, {len(CAT_NAMES)} hexadecimal ids), got {len(fields)}: {line[:60]!r}"
        )
    for column, (field, (pattern, required)) in enumerate(zip(fields, _FIELDS, strict=True)):
        if re.fullmatch(pattern, field) is None:
            raise ValueError(
                f"{where}, column {column + 1} ({COLUMN_NAMES[column]}): must be {required}, "
                f"got {field!r}"
            )
    raise AssertionError(f"{where}: the patterns of the row and of its columns differ")
