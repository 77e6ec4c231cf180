"""The files of a database of RocksDB, brought into another folder without changing them.

RocksDB changes no file of lines (``.sst``) once it is written, so that several databases may have
one in common; all other files of a database are its own.
"""

import errno
import os
import shutil
from pathlib import Path

_LINES = ".sst"
_LEFT_BEHIND = ("LOCK", "LOG")
"""Files, and beginnings of names of files, that a database makes anew."""
_CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Errors of hard links that the file system, or the one of the other folder, does not make."""


def share_files(source: Path, target: Path) -> None:
    """Make the folder ``target`` with the database of ``source``: hard links to files of lines
    where the file system has them, copies else. Returns when all is on disk.

    Raises:
        OSError: where a file cannot be read or written.
    """
    target.mkdir()
    for file in _files_of(source):
        made = target / file.name
        if file.suffix != _LINES or not _is_linked(file, made):
            shutil.copyfile(file, made)
            sync_to_disk(made)
    sync_to_disk(target)


def point_to_files(source: Path, target: Path) -> None:
    """Make the folder ``target`` with the database of ``source``, to be read as long as that is
    there: symbolic links to files of lines, and copies of the few others."""
    target.mkdir()
    for file in _files_of(source):
        made = target / file.name
        if file.suffix == _LINES:
            made.symlink_to(file.resolve())
        else:
            shutil.copyfile(file, made)


def sync_to_disk(path: Path) -> None:
    """Return when a file, or the names in a folder, are on disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _files_of(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if not p.name.startswith(_LEFT_BEHIND))


def _is_linked(file: Path, made: Path) -> bool:
    try:
        os.link(file, made)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        return False
    return True
