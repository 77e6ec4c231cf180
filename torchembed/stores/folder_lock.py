"""The right to use a folder, which one object of one process at a time has."""

import contextlib
import datetime
import errno
import json
import os
import socket
import threading
import weakref
from pathlib import Path

from torchembed.stores.errors import StoreInUseError

LOCK_FILE = "lock"

_held: dict[str, int] = {}
"""The process that has each folder which this one, or the one it was forked from, has locked.

Locks of the operating system do not see a second holder in one process, and the first one loses
them where the file is opened and closed again.
"""
_guard = threading.RLock()


class FolderLock:
    """A lock of a folder that exists, until :meth:`release`, or until it is gone.

    It ends with the process however that ends, and forked processes do not have it. A file in the
    folder says who has it alone.

    Args:
        is_shared: whether other processes may have it shared, too; one that wants it alone may not.

    Raises:
        StoreInUseError: where another has the lock; says who, where it has it alone.
        OSError: where this process may not write in the folder, or, for a shared lock, read there.
    """

    def __init__(self, folder: Path, *, is_shared: bool = False) -> None:
        # Not on every system, and needed by stores on disk alone.
        import fcntl

        key = os.path.realpath(folder)
        with _guard:
            if _held.get(key) == os.getpid():
                raise _refusal(folder, "another store of this process")
            access = os.O_RDONLY if is_shared else os.O_RDWR | os.O_CREAT
            file = os.open(folder / LOCK_FILE, access | os.O_CLOEXEC, 0o666)
            try:
                fcntl.lockf(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                if not is_shared:
                    _write_holder(file)
            except OSError as error:
                holder = _read_holder(file)
                os.close(file)
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise _refusal(folder, holder) from None
                raise
            _held[key] = os.getpid()
        self._unlock = weakref.finalize(self, _unlock, key, file, is_shared)

    def release(self) -> None:
        """Let others have the folder."""
        self._unlock()


def _unlock(key: str, file: int, is_shared: bool) -> None:
    with _guard:
        # A fork has the file, and not the lock.
        if _held.pop(key) == os.getpid() and not is_shared:
            # Or whoever is kept out by readers later on would be told of this process.
            os.ftruncate(file, 0)
        os.close(file)


def _write_holder(file: int) -> None:
    holder = {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(holder).encode(), 0)


def _read_holder(file: int) -> str:
    # The holder may be writing the file at this moment.
    with contextlib.suppress(ValueError, TypeError, KeyError, OSError):
        holder = json.loads(os.pread(file, 4096, 0))
        return f"process {holder['process']} on host {holder['host']}, since {holder['since']},"
    return "another process"


def _refusal(folder: Path, holder: str) -> StoreInUseError:
    return StoreInUseError(
        f"one store at a time may have {folder} open, and {holder} does; close that one, or give "
        "this one another folder"
    )
