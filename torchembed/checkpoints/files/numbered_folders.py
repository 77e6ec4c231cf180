"""Numbered folders that appear once they are whole, on local disks and in object stores."""

import re
import shutil
from pathlib import Path
from typing import Protocol

from torchembed.checkpoints.files.atomic_folder import AtomicFolder
from torchembed.checkpoints.files.storage import Storage

_NUMBER = re.compile(r"\d{6,}")


class NumberedFolders(Protocol):
    """Folders named by numbers of at least six digits, which rank 0 finishes one after another."""

    def numbers(self) -> list[int]:
        """The numbers of the folders that are whole, in order; none where there is no parent."""
        ...

    def folder(self, number: int) -> str:
        """The path or URL of a whole folder."""
        ...

    def unfinished(self, number: int) -> str:
        """The path or URL of a folder from :meth:`begin` to :meth:`complete`."""
        ...

    def begin(self, number: int) -> None:
        """Make the folder, without any file of an earlier attempt."""
        ...

    def complete(self, number: int, content: bytes) -> None:
        """Write the last file, with ``content``, so that the folder is whole; those of later
        numbers are removed before."""
        ...


def numbered_folders(path: str | Path, last_file: str) -> NumberedFolders:
    """The numbered folders in ``path``.

    Args:
        path: of a local folder, or the URL, which fsspec knows, of one.
        last_file: name of the file that is written last into each.
    """
    if "://" in str(path):
        storage = Storage(path)
        if not storage.is_local:
            return _FoldersInStore(storage, last_file)
        path = storage.root
    return _LocalFolders(Path(path), last_file)


class _LocalFolders:
    """Folders that are renamed once they are whole."""

    def __init__(self, path: Path, last_file: str) -> None:
        self._path, self._last_file = path, last_file

    def numbers(self) -> list[int]:
        names = (entry.name for entry in self._path.iterdir()) if self._path.is_dir() else ()
        return sorted(int(name) for name in names if _NUMBER.fullmatch(name))

    def folder(self, number: int) -> str:
        return str(self._path / f"{number:06d}")

    def unfinished(self, number: int) -> str:
        return f"{self.folder(number)}.partial"

    def begin(self, number: int) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        partial = Path(self.unfinished(number))
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()

    def complete(self, number: int, content: bytes) -> None:
        partial = Path(self.unfinished(number))
        (partial / self._last_file).write_bytes(content)
        # The last first, so that no folder is there without those before it.
        for later in reversed([n for n in self.numbers() if n >= number]):
            shutil.rmtree(self.folder(later))
        partial.rename(self.folder(number))


class _FoldersInStore:
    """Folders of an object store, which cannot be renamed: one is whole where it has its last
    file."""

    def __init__(self, storage: Storage, last_file: str) -> None:
        self._storage, self._last_file = storage, last_file

    def numbers(self) -> list[int]:
        return [int(name) for name in self._names() if self._storage.exists(self._last(name))]

    def folder(self, number: int) -> str:
        return f"{self._storage.url.rstrip('/')}/{number:06d}"

    def unfinished(self, number: int) -> str:
        return self.folder(number)

    def begin(self, number: int) -> None:
        # Its files are written where those of that number and of later ones are no more, the last
        # folder first, and in it the file that makes it count.
        for name in reversed(self._names()):
            if int(name) >= number:
                self._storage.remove(self._last(name))
                self._storage.remove(self._storage.path(name))
        self._atomic(number).begin()

    def complete(self, number: int, content: bytes) -> None:
        self._atomic(number).complete(content)

    def _names(self) -> list[str]:
        """The names of all numbered folders, whole or not, in the order of their numbers."""
        names = (name for name in self._storage.names() if _NUMBER.fullmatch(name))
        return sorted(names, key=int)

    def _atomic(self, number: int) -> AtomicFolder:
        return AtomicFolder(self._storage, self._storage.path(f"{number:06d}"), self._last_file)

    def _last(self, name: str) -> str:
        return self._storage.path(name, self._last_file)
