"""The file that an export writes, local or behind a URL, with the files beside it."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torchembed.checkpoints.files.storage import Storage
from torchembed.core.urls import is_url


class Target:
    """The file that an export writes, which shows once it is whole.

    Attributes:
        name: of the file, without its folder.
    """

    def __init__(self, path: str | Path) -> None:
        """
        Args:
            path: a local path, or a URL that fsspec knows.

        Raises:
            ImportError: if fsspec, or what it needs for the URL, is not installed.
            ValueError: for a URL that fsspec does not know.
        """
        self._path = path
        self._remote: Storage | None = None
        if is_url(path):
            storage = Storage(path)
            self._remote = None if storage.is_local else storage
            path = storage.root
        self._local = Path(path)
        self.name = self._local.name

    def check_is_free(self, *others: str) -> None:
        """Raise ``FileExistsError`` where the file is there, or one named in ``others`` beside
        it."""
        for name in (self.name, *others):
            if self._is_there(name):
                there = f"{str(self._path).removesuffix(self.name)}{name}"
                raise FileExistsError(f"path must not be there yet, and {there} is; remove it")

    @contextlib.contextmanager
    def folder_to_fill(self) -> Iterator[Path]:
        """A new local folder. What is in it when the context ends comes to where the export goes,
        this file after all others, or nothing does where an error ends the context.

        Files for a URL are in a temporary folder (in ``TMPDIR``) until they are uploaded. Where an
        upload fails, what was uploaded before is removed.
        """
        if self._remote is not None:
            with tempfile.TemporaryDirectory() as folder:
                yield Path(folder)
                _upload(self._remote, self._in_order(Path(folder)))
            return
        # Beside the file, so that a rename, which is one step, brings it there.
        partial = self._local.with_name(f".{self.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            yield partial
            for file in self._in_order(partial):
                file.replace(self._local.with_name(file.name))
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _is_there(self, name: str) -> bool:
        if self._remote is None:
            return self._local.with_name(name).exists()
        return self._remote.exists(_beside(self._remote, name))

    def _in_order(self, folder: Path) -> list[Path]:
        """The files of ``folder``. Once this one is there, all that it names is."""
        return sorted(folder.iterdir(), key=lambda file: file.name == self.name)


def _beside(storage: Storage, name: str) -> str:
    """Path of a file in the folder of the root, which is a file itself."""
    return f"{storage.root.rpartition('/')[0]}/{name}"


def _upload(storage: Storage, files: list[Path]) -> None:
    try:
        for file in files:
            storage.upload(file, _beside(storage, file.name))
    except BaseException:
        for file in files:
            storage.remove(_beside(storage, file.name))
        raise
