"""Errors of RocksDB, whose kind rocksdict tells by their text alone, as what they mean."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from torchembed.stores.errors import CorruptStoreError, RowStoreError

_OF_THE_SYSTEM = {
    errno.ENOSPC: "make room there, and the next write is done",
    errno.EDQUOT: "make room there, and the next write is done",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "mount it writable, and the next write is done",
    errno.EACCES: "let this process read and write it",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.EIO: "see what the system says of the disk",
}


class WriteStalledError(RowStoreError):
    """A write was not done, since RocksDB would have let it wait."""


_FILES_ARE_MISSING = (os.strerror(errno.ENOENT), "does not exist (create_if_missing is false)")


@contextlib.contextmanager
def faults_named(path: Path) -> Iterator[None]:
    """Raise what RocksDB raises within as ``OSError``, ``CorruptStoreError`` or ``RowStoreError``
    of the store in ``path``."""
    try:
        yield
    except Exception as error:
        # rocksdict raises Exception itself; a subclass is Python's own, or its caller's.
        if type(error) is not Exception:
            raise
        raise _named(str(error), path) from None


def _named(text: str, path: Path) -> Exception:
    if text.startswith("Corruption") or any(part in text for part in _FILES_ARE_MISSING):
        return CorruptStoreError(
            f"the store in {path} is not as it was written; restore it from a checkpoint ({text})"
        )
    for number in _OF_THE_SYSTEM:
        if os.strerror(number) in text:
            return system_fault(number, path, text)
    if text == "Result incomplete: Write stall":
        return WriteStalledError(f"the store in {path} takes no writes now")
    if text.endswith("Writer has previous error."):
        return RowStoreError(f"a write to the store in {path} failed before; write again")
    return RowStoreError(f"the store in {path} fails, and RocksDB says why: {text}")


def system_fault(number: int, path: Path, text: str) -> OSError:
    """An error of the operating system by its number, with what to do about it."""
    advice = _OF_THE_SYSTEM.get(number, "see what the system says of the disk")
    # OSError makes PermissionError and others of itself, by the number.
    return OSError(number, f"{os.strerror(number)}: {advice} ({text})", str(path))
