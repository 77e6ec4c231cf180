"""The rows that a cache has room for."""

import math
from collections.abc import Mapping, Sequence

from torchembed.serving.levels.served_table import ServedTable, positions_of

_DEVIATIONS = 7.5
_WHOLE_TABLE_ROOM = 1.125
"""Slots for each row of a whole table: 4096 of them are for 3641 keys on average, whose number is
off by 60 in the standard deviation."""


def rows_of_tables(
    tables: Sequence[ServedTable],
    num_rows: int | Mapping[str, int] | None,
    num_bytes: int | None,
) -> list[int]:
    """The rows of each table that there is to be room for."""
    if (num_rows is None) == (num_bytes is None):
        raise ValueError(
            f"give exactly one of num_rows and num_bytes, got {num_rows} and {num_bytes}"
        )
    if isinstance(num_rows, Mapping):
        positions_of(list(num_rows), tables)
        lacking = [table.name for table in tables if table.name not in num_rows]
        if lacking:
            raise ValueError(f"num_rows must have all tables, got none for {lacking}")
        counts = [num_rows[table.name] for table in tables]
    elif num_rows is not None:
        counts = [num_rows // len(tables)] * len(tables)
    else:
        assert num_bytes is not None
        counts = [num_bytes // len(tables) // table.line_bytes for table in tables]
    for table, count in zip(tables, counts, strict=True):
        if count < 1:
            raise ValueError(
                f"the cache must have room for at least 1 row of table {table.name!r}, got "
                f"{count}; give a larger num_rows or num_bytes"
            )
    return counts


def rows_of_device(num_rows: int, num_devices: int, *, is_whole: bool) -> int:
    """The rows of a table that one device has room for."""
    if not is_whole:
        return -(-num_rows // num_devices)
    mean = num_rows / num_devices
    # The keys of a device, and of each block of its slots, are more than the mean by as many
    # standard deviations at most, but for one table in 10**12.
    unevenness = _DEVIATIONS * math.sqrt(mean) if num_devices > 1 else 0.0
    return math.ceil((mean + unevenness) * _WHOLE_TABLE_ROOM)
