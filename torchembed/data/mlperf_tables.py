"""``tables.json``, which the preprocessing writes into the folder of MLPerf's days."""

import json
from typing import Any, NamedTuple

from torchembed.data.criteo import CAT_NAMES
from torchembed.data.data_path import DataPath

TABLES_FILE = "tables.json"


class Tables(NamedTuple):
    """Sizes and hotness of the tables of a folder of days, as it states them."""

    sizes: tuple[int, ...]
    """Rows of each table."""
    hotness: tuple[int, ...] | None
    """Ids a sample of each feature, where it is said."""


def read_tables(folder: DataPath) -> Tables | None:
    """The contents of ``tables.json`` in ``folder``; None where it is not there.

    Raises:
        ValueError: if the file is not a JSON object with 26 positive integers as
            ``table_sizes``, and the same as ``hotness`` if it has that key.
    """
    path = folder / TABLES_FILE
    if not path.is_file():
        return None
    try:
        tables = json.loads(path.read_text(encoding="utf-8"))
    # Also where the bytes are not text.
    except ValueError as error:
        raise ValueError(
            f"{path}: must be JSON, and cannot be read as such ({error}); preprocess the days "
            "again, or remove it and give table_sizes"
        ) from error
    if not isinstance(tables, dict) or "table_sizes" not in tables:
        found = sorted(tables) if isinstance(tables, dict) else type(tables).__name__
        raise ValueError(
            f"{path}: must be a JSON object with table_sizes, got {found}; preprocess the days "
            "again, or remove it and give table_sizes"
        )
    hotness = tables.get("hotness")
    return Tables(
        _counts(path, "table_sizes", tables["table_sizes"]),
        None if hotness is None else _counts(path, "hotness", hotness),
    )


def _counts(path: DataPath, key: str, value: Any) -> tuple[int, ...]:
    is_list = isinstance(value, list) and len(value) == len(CAT_NAMES)
    # JSON's true is an int to Python.
    if not is_list or not all(type(count) is int and count > 0 for count in value):
        raise ValueError(
            f"{path}: {key} must be {len(CAT_NAMES)} positive integers, one for each feature, "
            f"got {value}"
        )
    return tuple(value)
