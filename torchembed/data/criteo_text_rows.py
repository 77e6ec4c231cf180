"""Rows of Criteo's text files as arrays, by numpy alone.

A field is at most 16 characters, so two unaligned 64-bit loads that end where the field ends hold
all of it, and its digits are summed inside the words, for all fields of a block at once.
"""

import gzip
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from torchembed.data.criteo import CAT_NAMES, INT_NAMES
from torchembed.data.source import FileRows

COLUMN_NAMES = ("label", *INT_NAMES, *CAT_NAMES)
NUM_COLUMNS = len(COLUMN_NAMES)
MAX_DECIMAL_DIGITS = 15
MAX_HEX_DIGITS = 8

_TAB, _NEWLINE, _MINUS, _ZERO = b"\t\n-0"
_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK_BYTES = 4 << 20
_MAX_ROW_BYTES = 1 << 16


class TextRows(NamedTuple):
    """Whole rows of one file."""

    path: Path
    first_row: int
    """Position of the first of them in the file, from 0."""
    text: NDArray[np.uint8]
    """Their characters; every row ends in a newline."""
    row_ends: NDArray[np.int64]
    """``[rows]``: where in ``text`` each newline is."""

    @property
    def num_rows(self) -> int:
        return len(self.row_ends)

    def cut(self, num_rows: int) -> tuple["TextRows", "TextRows"]:
        """The first ``num_rows`` of them, and the rest; both views of the same text."""
        at = int(self.row_ends[num_rows - 1]) + 1 if num_rows else 0
        head = self._replace(text=self.text[:at], row_ends=self.row_ends[:num_rows])
        rest = self._replace(
            first_row=self.first_row + num_rows,
            text=self.text[at:],
            row_ends=self.row_ends[num_rows:] - at,
        )
        return head, rest


class CriteoRows(NamedTuple):
    """Rows as numbers; a missing count or id is 0."""

    labels: NDArray[np.float32]
    """``[rows]``, 0 or 1."""
    counts: NDArray[np.int64]
    """``[rows, 13]``."""
    ids: NDArray[np.uint64]
    """``[rows, 26]``, each less than 2**32."""


def read_chunks(path: Path) -> Iterator[bytes]:
    """The decompressed text of ``path``, piece by piece; gzip is known by its first bytes.

    Raises:
        ValueError: where the file is empty, or a compressed one is cut off or damaged.
    """
    num_bytes = 0
    with open(path, "rb") as raw:
        compressed = raw.read(2) == _GZIP_MAGIC
        raw.seek(0)
        stream: IO[bytes] | gzip.GzipFile = gzip.GzipFile(fileobj=raw) if compressed else raw
        while True:
            try:
                chunk = stream.read(_CHUNK_BYTES)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(
                    f"{path}: the compressed file is cut off or damaged after {num_bytes} bytes "
                    f"of text ({error}); fetch it again"
                ) from error
            if not chunk:
                break
            num_bytes += len(chunk)
            yield chunk
    if not num_bytes:
        raise ValueError(f"{path} is empty; it must hold rows of {NUM_COLUMNS} columns")


def count_rows(path: Path) -> int:
    """Rows of a text file, by one pass over it; remembered until the file changes."""
    status = path.stat()
    return _count_rows(path, status.st_size, status.st_mtime_ns)


@lru_cache
def _count_rows(path: Path, _size: int, _mtime_ns: int) -> int:
    num_rows, last = 0, b"\n"
    for chunk in read_chunks(path):
        num_rows += chunk.count(b"\n")
        last = chunk[-1:]
    return num_rows + (last != b"\n")


def read_rows(file_rows: FileRows) -> Iterator[TextRows]:
    """Rows of a file, a few megabytes of whole rows at a time."""
    path, start, stop = file_rows
    row, unfinished = 0, b""
    for chunk in _newline_ended(read_chunks(path)):
        whole, newline, rest = chunk.rpartition(b"\n")
        if not newline:
            unfinished += rest
            if len(unfinished) > _MAX_ROW_BYTES:
                raise ValueError(f"{path}, row {row + 1}: goes on for {len(unfinished)} bytes")
            continue
        text = np.frombuffer(unfinished + whole + newline, np.uint8)
        unfinished = rest
        rows = TextRows(path, row, text, np.flatnonzero(text == _NEWLINE))
        row += rows.num_rows
        if rows.first_row < start:
            _, rows = rows.cut(min(start - rows.first_row, rows.num_rows))
        if stop is not None and row > stop:
            rows, _ = rows.cut(max(stop - rows.first_row, 0))
        if rows.num_rows:
            yield rows
        if stop is not None and row >= stop:
            return


def row_blocks(
    files: Sequence[FileRows], block_rows: int, num_skipped: int = 0
) -> Iterator[list[TextRows]]:
    """Blocks of ``block_rows`` rows and what is left; one may run from a file into the next.

    The first ``num_skipped`` rows of all are left out.
    """
    block: list[TextRows] = []
    missing = block_rows
    for file in files:
        for rest in read_rows(file):
            skipped, rest = rest.cut(min(num_skipped, rest.num_rows))
            num_skipped -= skipped.num_rows
            while rest.num_rows:
                rows, rest = rest.cut(min(missing, rest.num_rows))
                block.append(rows)
                missing -= rows.num_rows
                if not missing:
                    yield block
                    block, missing = [], block_rows
    if block:
        yield block


def _newline_ended(chunks: Iterator[bytes]) -> Iterator[bytes]:
    last = b""
    for chunk in chunks:
        last = chunk[-1:]
        yield chunk
    if last != b"\n":
        yield b"\n"


def parse_block(block: Sequence[TextRows]) -> CriteoRows:
    """The numbers of all rows of a block; raises as :func:`parse_rows` does."""
    parts = [parse_rows(rows) for rows in block]
    return CriteoRows(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def parse_rows(rows: TextRows) -> CriteoRows:
    """The numbers of ``rows``.

    Raises:
        ValueError: names the file, the row (from 1), the column and what came, where a row has not
            40 columns, a label is not 0 or 1, a count is not a decimal integer of at most 15
            digits, or an id is not a hexadecimal one of at most 8 digits.
    """
    # Two words of padding, so that no load of a short first field begins before the text.
    text = np.concatenate([np.zeros(16, np.uint8), rows.text])
    words = np.ndarray(len(text) - 7, "<u8", text, strides=(1,))
    ends = np.flatnonzero((text == _TAB) | (text == _NEWLINE))
    row_ends = rows.row_ends + 16
    if not np.array_equal(ends[NUM_COLUMNS - 1 :: NUM_COLUMNS], row_ends):
        _raise_bad_columns(rows, ends, row_ends)
    starts = np.concatenate([[16], ends[:-1] + 1]).reshape(-1, NUM_COLUMNS)
    ends = ends.reshape(-1, NUM_COLUMNS)

    labels = text[starts[:, 0]] - np.uint8(_ZERO)
    _check_fields(rows, 0, (labels > 1) | (ends[:, 0] - starts[:, 0] != 1), "0 or 1")

    first_cat = 1 + len(INT_NAMES)
    begin, end = starts[:, 1:first_cat], ends[:, 1:first_cat]
    negative = text[begin] == _MINUS
    num_digits = end - begin - negative
    low, bad_low = _decimal_word(words[end - 8], num_digits)
    high, bad_high = _decimal_word(words[end - 16], num_digits - 8)
    bad = bad_low | bad_high | (num_digits > MAX_DECIMAL_DIGITS) | (negative & (num_digits == 0))
    required = f"an integer of at most {MAX_DECIMAL_DIGITS} digits, or empty"
    _check_fields(rows, 1, bad, required)
    counts = (high * np.uint64(10**8) + low).astype(np.int64)
    np.negative(counts, out=counts, where=negative)

    begin, end = starts[:, first_cat:], ends[:, first_cat:]
    ids, bad = _hex_word(words[end - 8], end - begin)
    required = f"a hexadecimal id of at most {MAX_HEX_DIGITS} digits, or empty"
    _check_fields(rows, first_cat, bad | (end - begin > MAX_HEX_DIGITS), required)
    return CriteoRows(labels.astype(np.float32), counts, ids)


def _keep_digits(words: NDArray[np.uint64], num_digits: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The last ``num_digits`` characters of each word, "0" in place of those before them."""
    # numpy shifts by 64 to zero.
    unused = 8 * (8 - np.clip(num_digits, 0, 8)).astype(np.uint64)
    zeros = np.uint64(0x3030303030303030) >> (np.uint64(64) - unused)
    return (words >> unused << unused) | zeros


def _decimal_word(
    words: NDArray[np.uint64], num_digits: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Values of the decimal digits at the end of each word, and which words hold other things.

    The first digit is the lowest byte: 10 * digit + next digit makes pairs, and two
    multiplications sum the pairs with their weights 100**3 to 100**0.
    """
    digits = _keep_digits(words, num_digits) ^ np.uint64(0x3030303030303030)
    above_nine = digits + np.uint64(0x7676767676767676)
    bad = ((above_nine | digits) & np.uint64(0x8080808080808080)) != 0
    pairs = digits * np.uint64(10) + (digits >> np.uint64(8))
    odd = np.uint64(0x000000FF000000FF)
    first = (pairs & odd) * np.uint64(100 + (1_000_000 << 32))
    second = (pairs >> np.uint64(16) & odd) * np.uint64(1 + (10_000 << 32))
    return (first + second) >> np.uint64(32), bad


def _hex_word(
    words: NDArray[np.uint64], num_digits: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Values of the hexadecimal digits at the end of each word, and which words hold others."""
    characters = _keep_digits(words, num_digits)
    is_letter = characters >> np.uint64(6) & np.uint64(0x0101010101010101)
    digits = (characters & np.uint64(0x0F0F0F0F0F0F0F0F)) + is_letter * np.uint64(9)
    # Written out again in small letters, the digits must give the characters that were there.
    above_nine = (digits + np.uint64(0x0606060606060606)) >> np.uint64(4)
    above_nine &= np.uint64(0x0101010101010101)
    written = digits + np.uint64(0x3030303030303030) + above_nine * np.uint64(0x27)
    bad = written != (characters | is_letter << np.uint64(5))
    bad |= (digits & np.uint64(0xF0F0F0F0F0F0F0F0)) != 0
    value = (digits << np.uint64(4) | digits >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)
    value = (value << np.uint64(8) | value >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF)
    return (value << np.uint64(16) | value >> np.uint64(32)) & np.uint64(0xFFFFFFFF), bad


def _check_fields(rows: TextRows, first_column: int, bad: NDArray[np.bool_], required: str) -> None:
    if not bad.any():
        return
    row, column = divmod(int(bad.argmax()), bad[0].size)
    column += first_column
    got = _row_text(rows, row).split(b"\t")[column].decode(errors="replace")
    raise ValueError(
        f"{rows.path}, row {rows.first_row + row + 1}, column {column + 1} "
        f"({COLUMN_NAMES[column]}): must be {required}, got {got!r}"
    )


def _raise_bad_columns(
    rows: TextRows, ends: NDArray[np.int64], row_ends: NDArray[np.int64]
) -> NoReturn:
    num_columns = np.diff(np.searchsorted(ends, row_ends, side="right"), prepend=0)
    row = int((num_columns != NUM_COLUMNS).argmax())
    start = _row_text(rows, row)[:60].decode(errors="replace")
    raise ValueError(
        f"{rows.path}, row {rows.first_row + row + 1}: must have {NUM_COLUMNS} tab-separated "
        f"columns (label, {len(INT_NAMES)} integers, {len(CAT_NAMES)} hexadecimal ids), "
        f"got {num_columns[row]}: {start!r}"
    )


def _row_text(rows: TextRows, row: int) -> bytes:
    start = int(rows.row_ends[row - 1]) + 1 if row else 0
    return rows.text[start : rows.row_ends[row]].tobytes()
