"""Writes to RocksDB that wait for it without holding Python's global lock, and not for ever."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torchembed.stores.errors import RowStoreError
from torchembed.stores.rocksdb.faults import WriteStalledError, faults_named

if TYPE_CHECKING:
    import rocksdict

_POLL_SECONDS = 0.005

_FAILING_SECONDS = 5.0
"""How long a write is tried again where RocksDB failed to write a file, and may do so yet."""


def refuse_stalls(db: "rocksdict.Rdict") -> None:
    """Let writes of ``db`` fail, as :func:`write_whole` needs it, where RocksDB would let them wait
    until it has moved lines to sorted files."""
    import rocksdict

    options = rocksdict.WriteOptions()
    options.no_slowdown = True
    db.set_write_options(options)


def write_whole(
    db: "rocksdict.Rdict", folder: Path, fill: Callable[["rocksdict.WriteBatch"], None]
) -> None:
    """Write what ``fill`` puts into a batch, whole or not at all.

    Waits while RocksDB takes no writes. RocksDB itself would wait in C++, where no other thread of
    Python runs, and for ever where the disk is full.

    Args:
        db: prepared by :func:`refuse_stalls`.
        folder: of the store, for errors.
        fill: may be called several times, each time with an empty batch.

    Raises:
        OSError, RowStoreError: where files cannot be written.
    """
    import rocksdict

    failing_since = None
    while True:
        batch = rocksdict.WriteBatch(raw_mode=True)
        fill(batch)
        try:
            with faults_named(folder):
                db.write(batch)
            return
        except WriteStalledError:
            # Why it fails, the next write is told once RocksDB has given up.
            if not _wait_while_stalled(db):
                failing_since = failing_since or time.monotonic()
        if failing_since is not None and time.monotonic() > failing_since + _FAILING_SECONDS:
            raise RowStoreError(
                f"the store in {folder} cannot write its files, and rows/LOG in it says why; mend "
                "that, then write again"
            )


def _wait_while_stalled(db: "rocksdict.Rdict") -> bool:
    """Return True when RocksDB takes writes, or False soon, where it failed to write files."""
    while True:
        time.sleep(_POLL_SECONDS)
        is_stopped = db.property_int_value("rocksdb.is-write-stopped")
        if not is_stopped and not db.property_int_value("rocksdb.actual-delayed-write-rate"):
            return True
        if db.property_int_value("rocksdb.background-errors"):
            return False
