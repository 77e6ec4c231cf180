"""The folder of a version while it is written, which one ``deploy`` at a time has."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EBADF)
"""Errors of a file system that has no locks of folders."""


@contextlib.contextmanager
def empty_partial_folder(path: Path) -> Iterator[None]:
    """A context in which the folder ``path`` is this caller's, made where there is none, and begins
    empty. What a process that was killed has left there is removed. It may be renamed.

    Raises:
        FileExistsError: where another one is writing there.
        OSError: where it cannot be made or emptied.
    """
    # Not on every system, and needed by whoever deploys alone.
    import fcntl

    path.mkdir(parents=True, exist_ok=True)
    folder = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileExistsError(
                f"version must be written by one deploy at a time, and another one is writing "
                f"{path}; wait until it ends, or take another version"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        for entry in path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        yield
    finally:
        os.close(folder)
