"""Text files with an integer in every field."""

from collections.abc import Sequence
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from torchembed.data.data_path import DataPath


def read_numbers(
    path: DataPath, columns: Sequence[str], *, separator: str, has_header: bool = False
) -> NDArray[np.int64]:
    """The rows of a text file, ``[rows, columns]``; lines may end as on Unix or on Windows.

    Args:
        path: the file.
        columns: the name of each column, in order.
        separator: of one or more characters, none of them a digit or a sign.
        has_header: whether the first line holds the names.

    Raises:
        ValueError: where the file has no rows, another header, or a line with other fields; names
            the file, the line (from 1), the column and what came.
    """
    # A file opened as text translates the ends of lines.
    lines = path.read_text(encoding="latin-1").split("\n")
    if has_header:
        header = lines.pop(0)
        if header != separator.join(columns):
            raise ValueError(
                f"{path}, line 1: must be {separator.join(columns)}, got {header[:100]!r}"
            )
    first_line = 2 if has_header else 1
    if not any(lines):
        raise ValueError(f"{path}: must hold rows of {', '.join(columns)}, got none")
    try:
        # numpy's parser takes a separator of one character.
        fields = (line.replace(separator, "\t") for line in lines)
        rows = np.loadtxt(fields, np.int64, delimiter="\t", comments=None, ndmin=2)
    except ValueError as error:
        _raise_bad_line(path, columns, separator, lines, first_line, error)
    if rows.shape[1] != len(columns):
        _raise_bad_line(path, columns, separator, lines, first_line, None)
    return rows


def _raise_bad_line(
    path: DataPath,
    columns: Sequence[str],
    separator: str,
    lines: Sequence[str],
    first_line: int,
    cause: ValueError | None,
) -> NoReturn:
    for number, line in enumerate(lines, first_line):
        fields = line.split(separator)
        if fields == [""]:
            continue
        if len(fields) != len(columns):
            raise ValueError(
                f"{path}, line {number}: must have {len(columns)} fields ({', '.join(columns)}) "
                f"between {separator!r}, got {len(fields)}: {line[:60]!r}"
            ) from cause
        for name, field in zip(columns, fields, strict=True):
            if not field.removeprefix("-").isdecimal():
                raise ValueError(
                    f"{path}, line {number}, {name}: must be an integer, got {field!r}"
                ) from cause
    raise ValueError(f"{path}: cannot be read ({cause})") from cause
