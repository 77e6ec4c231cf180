"""Commands to Redis in its protocol, built from arrays without a step of Python for each row."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_JOINED_BYTES = 1 << 16
"""Parts of an exchange up to so many bytes are sent at once, which is quicker than one by one."""


class Exchange(NamedTuple):
    """Commands that one server does one after the other, and how many replies come."""

    key: bytes
    """A name in Redis that they use, by which clusters choose the server."""
    parts: list[bytes | memoryview]
    num_replies: int
    is_transaction: bool = False


def exchange(key: bytes, *commands: list[bytes | memoryview]) -> Exchange:
    """An exchange of commands that are done one after the other."""
    return Exchange(key, _joined([part for parts in commands for part in parts]), len(commands))


def transaction(key: bytes, *commands: list[bytes | memoryview]) -> Exchange:
    """An exchange of commands that are done all or none, with no other's between them.

    The last reply has the replies of all.
    """
    inside = exchange(key, command(b"MULTI"), *commands, command(b"EXEC"))
    return inside._replace(is_transaction=True)


def command(*arguments: bytes | int) -> list[bytes | memoryview]:
    """A command of a few arguments."""
    encoded = [b"%d" % a if isinstance(a, int) else a for a in arguments]
    return [
        b"".join([b"*%d\r\n" % len(encoded), *(b"$%d\r\n%b\r\n" % (len(a), a) for a in encoded)])
    ]


def rows_command(
    arguments: Sequence[bytes | int], *columns: np.ndarray
) -> list[bytes | memoryview]:
    """A command of ``arguments`` and, row by row, of the items of ``columns``, uint8
    ``[n, bytes of an item]`` each."""
    num_rows = len(columns[0])
    (head,) = command(*arguments)
    num_arguments = len(arguments) + num_rows * len(columns)
    # The head with the number of all arguments in place of its own.
    head = b"*%d\r\n" % num_arguments + bytes(head).split(b"\r\n", 1)[1]
    fields, lengths = [], []
    for n, column in enumerate(columns):
        lengths.append(b"$%d\r\n" % column.shape[1])
        fields += [
            (f"length{n}", f"S{len(lengths[n])}"),
            (f"item{n}", "u1", (column.shape[1],)),
            (f"end{n}", "S2"),
        ]
    rows = np.empty(num_rows, dtype=np.dtype(fields))
    for n, column in enumerate(columns):
        rows[f"length{n}"] = lengths[n]
        rows[f"item{n}"] = column
        rows[f"end{n}"] = b"\r\n"
    return [head, rows.view(np.uint8).data]


def as_decimals(numbers: np.ndarray) -> np.ndarray:
    """Numbers from 0 on as items of a column: 19 decimal digits each."""
    digits = np.char.zfill(numbers.astype("S19"), 19).astype("S19")
    return digits.view(np.uint8).reshape(-1, 19)


def _joined(parts: list[bytes | memoryview]) -> list[bytes | memoryview]:
    joined: list[bytes | memoryview] = []
    small: list[bytes | memoryview] = []
    for part in parts:
        if len(part) <= _JOINED_BYTES:
            small.append(part)
        else:
            joined += [b"".join(small), part]
            small = []
    return [part for part in (*joined, b"".join(small)) if part]
