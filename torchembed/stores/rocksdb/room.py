"""Check that a disk has the room that RocksDB needs to be opened."""

import errno
import os
import tempfile
from pathlib import Path

from torchembed.stores.rocksdb.faults import system_fault

_OPENING_BYTES = 1 << 20
"""Bytes of the files that an opened database has beside lines."""


def check_room(folder: Path, rows: Path) -> None:
    """Raise ``OSError`` where the folder of a store has no room for opening the database in
    ``rows``, which moves what is in its log to a file of lines."""
    num_bytes = sum(path.stat().st_size for path in rows.glob("*.log"))
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes + _OPENING_BYTES)
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return
        raise system_fault(error.errno or errno.EIO, folder, str(error)) from None
