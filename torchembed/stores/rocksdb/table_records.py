"""Records within a RocksDB database of its format, and of the number of each table."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torchembed.stores.errors import CorruptStoreError, RowStoreError
from torchembed.stores.rocksdb.faults import faults_named

if TYPE_CHECKING:
    import rocksdict

ROWS = "rows"
"""The folder of RocksDB's own files, within that of the store."""

FORMAT = 1
"""Version of what the folder and the database hold; others are refused."""

PREFIX_BYTES = 4
"""Every key of the database begins with the number of a table, big-endian; numbers are from 1 on.

Under 0 are records: the format under no further bytes, and each table under its name.
"""


class TableRecord(NamedTuple):
    """The database's record of a table."""

    number: int
    line_bytes: int


def prefix(number: int) -> bytes:
    """The beginning of the keys of table ``number``."""
    return number.to_bytes(PREFIX_BYTES, "big")


def record_key(name: str) -> bytes:
    """The key of the record of a table."""
    return prefix(0) + name.encode()


def read_records(db: "rocksdict.Rdict", folder: Path) -> dict[str, TableRecord]:
    """The records of all tables by name.

    Raises:
        CorruptStoreError: for a database without its records.
        RowStoreError: for one of another format; or what RocksDB says of the one in ``folder``.
    """
    with faults_named(folder):
        records = _read_range(db, prefix(0), prefix(1))
    try:
        found = {key[PREFIX_BYTES:].decode(): json.loads(value) for key, value in records}
        version = found.pop("")["format"]
        if version == FORMAT:
            return {name: TableRecord(**record) for name, record in found.items()}
    except (ValueError, KeyError, TypeError):
        raise CorruptStoreError(
            f"the database in {folder / ROWS} must be one that a store made, and lacks its "
            "records; give another folder, or restore this one from a checkpoint"
        ) from None
    raise RowStoreError(
        f"the store in {folder} has format {version}, and this release knows {FORMAT}; open it "
        "with the release that wrote it"
    )


def _read_range(rows: "rocksdict.Rdict", begin: bytes, end: bytes) -> list[tuple[bytes, bytes]]:
    found = []
    rest = rows.iter()
    rest.seek(begin)
    while rest.valid() and rest.key() < end:
        found.append((rest.key(), rest.value()))
        rest.next()
    rest.status()
    return found
