"""Folders in which the tables of one process keep their rows while it runs."""

import errno
import itertools
import logging
import os
import shutil
import threading
import weakref
from pathlib import Path

import torch.distributed as dist

from torchembed.stores.folder_lock import FolderLock

_logger = logging.getLogger(__name__)
_guard = threading.Lock()
_held: "weakref.WeakValueDictionary[tuple[int, str], ScratchFolder]" = weakref.WeakValueDictionary()
"""Those that processes hold, by process and path: one that was forked holds none of its parent's.
"""


class ScratchFolder:
    """The folder below ``path`` that this process alone uses, ``rank_<rank>_of_<ranks>``, for as
    long as this object lives. What a former run left in it is removed first.

    Raises:
        StoreInUseError: if another process uses it.
        OSError: if it cannot be made, read or written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers = itertools.count()
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        self._lock = FolderLock(folder)
        # Nothing but what was made here: the path is of the user's choice.
        left = [entry for entry in folder.iterdir() if entry.name.isdecimal() and entry.is_dir()]
        for entry in left:
            shutil.rmtree(entry)
        if left:
            _logger.info("removed rows of tables in %s, which a former run left there", folder)

    def new_folder(self) -> Path:
        """The path of a folder that is not there yet, another one in each call."""
        return self.folder / str(next(self._numbers))


def scratch_folder(path: str | os.PathLike[str]) -> ScratchFolder:
    """The folder of this process below ``path``; one object while it is in use."""
    group = dist.group.WORLD if dist.is_available() else None
    rank, num_ranks = (0, 1) if group is None else (group.rank(), group.size())
    folder = Path(path).absolute() / f"rank_{rank}_of_{num_ranks}"
    with _guard:
        key = os.getpid(), os.path.realpath(folder)
        found = _held.get(key)
        if found is None:
            found = _held[key] = ScratchFolder(folder)
        return found


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(
            errno.ENOTDIR, "path of Disk must be a folder, and is a file; give another", str(path)
        ) from None
    except OSError as error:
        if error.errno == errno.ENOENT and not path.parent.exists():
            raise FileNotFoundError(
                errno.ENOENT,
                "path of Disk must be in a folder that exists; make it",
                str(path.parent),
            ) from None
        raise OSError(
            error.errno,
            "path of Disk must be a folder that can be made, and the system says "
            f"'{error.strerror}'; give another",
            str(path),
        ) from error
