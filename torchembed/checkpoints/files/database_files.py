"""Databases in the folder of a checkpoint, wherever that is."""

import errno
import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from torchembed.checkpoints.files.storage import FileDigest, Storage
from torchembed.stores import RocksDBStore, RowStore, sync_to_disk

_CHECKED_WHEN_READ = ".sst"
"""Files of lines, which may be terabytes and have checksums of their own."""


def put_database(storage: Storage, source: Path, path: str) -> None:
    """Move a saved database, a local folder, to ``path`` in a checkpoint: by its name where both
    are on one file system, else by copying.

    Raises:
        OSError: if files cannot be written.
    """
    if not (storage.is_local and _is_renamed(source, path)):
        for file in _files_in(source):
            name = f"{path}/{file.relative_to(source).as_posix()}"
            storage.mkdir(name.rsplit("/", 1)[0])
            with file.open("rb") as opened, storage.create_stream(name, "wb") as stream:
                shutil.copyfileobj(opened, stream, 1 << 24)
        shutil.rmtree(source)
        return
    for file in _files_in(Path(path)):
        digest = FileDigest(file.stat().st_size, None)
        if file.suffix != _CHECKED_WHEN_READ:
            digest = storage.digest(str(file))
        storage.written[f"{path}/{file.relative_to(path).as_posix()}"] = digest
    sync_to_disk(Path(path).parent)


class DatabaseFolders:
    """The databases of a checkpoint as local folders; those of other storages are fetched into
    temporary ones, until :meth:`close`."""

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage, self._path = storage, path
        self._fetched: dict[str, Path] = {}
        self._stack = ExitStack()

    def local(self, name: str) -> Path:
        """The local folder of a database, by the name of its folder in the checkpoint."""
        if self._storage.is_local:
            return Path(self._path, name)
        if name not in self._fetched:
            made = self._stack.enter_context(tempfile.TemporaryDirectory())
            self._fetched[name] = Path(made, "database")
            self._storage.fetch(f"{self._path}/{name}", str(self._fetched[name]))
        return self._fetched[name]

    def open(self, name: str) -> RowStore:
        """The database of a folder, to be read."""
        return RocksDBStore.open_checkpoint(self.local(name))

    def close(self) -> None:
        """Remove what was fetched."""
        self._stack.close()
        self._fetched.clear()


def _is_renamed(source: Path, path: str) -> bool:
    try:
        os.rename(source, path)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return False
    return True


def _files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
