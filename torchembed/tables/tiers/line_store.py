"""The rows of a group of tables on disk, as lines by their numbers."""

import contextlib
import os
import shutil
import weakref
from pathlib import Path

import torch
from torch import Tensor

from torchembed.stores import RocksDBStore, RowStoreError, RowTable
from torchembed.stores.arguments import MAX_WRITE_BYTES
from torchembed.stores.rocksdb_database import import_rocksdict
from torchembed.tables.tiers.line_layout import LineLayout
from torchembed.tables.tiers.scratch_folders import ScratchFolder, scratch_folder

LINES = "rows"
"""The name of the table of lines in the store."""


class LineStore:
    """Lines of a group's rows by the numbers of these, in a database of their own.

    The database is made when the first line is written, and removed with this object. Calls come
    from one thread at a time.

    Args:
        path: of the ``Disk`` of the tables.
        layout: of the lines.
    """

    def __init__(self, path: str | os.PathLike[str], layout: LineLayout) -> None:
        self.layout = layout
        self._path = path
        self._scratch: ScratchFolder | None = None
        self._open: _OpenStore | None = None

    def take_folder(self) -> ScratchFolder:
        """Take the folder of this process under the path, before the first line is written.

        Raises:
            ImportError: where rocksdict is not installed.
            StoreInUseError: where another process keeps rows there.
            OSError: where folders cannot be made, read or written.
        """
        if self._scratch is None:
            import_rocksdict()
            self._scratch = scratch_folder(self._path)
        return self._scratch

    @property
    def is_empty(self) -> bool:
        """True if no line was ever written."""
        return self._open is None

    @property
    def table(self) -> RowTable | None:
        """The table of lines; None while there is none."""
        return None if self._open is None else self._open.table

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Lines uint8 ``[n, line_bytes]`` of ``rows``, int64 ``[n]``, and bool ``[n]``: which rows
        have one; the others' lines hold anything."""
        lines = torch.empty(len(rows), self.layout.line_bytes, dtype=torch.uint8, device="cpu")
        if self._open is None or not len(rows):
            return lines, torch.zeros(len(rows), dtype=torch.bool, device="cpu")
        return lines, self._open.table.read(rows, lines)

    def write(self, rows: Tensor, lines: Tensor) -> None:
        """Write ``lines``, as :meth:`read` gives them, under ``rows``.

        Raises:
            ImportError, StoreInUseError, OSError: as :meth:`take_folder`.
        """
        if not len(rows):
            return
        if self._open is None:
            self._open = _OpenStore(self.take_folder(), self.layout.line_bytes)
        # A store takes so many bytes at once.
        step = max(MAX_WRITE_BYTES // self.layout.line_bytes, 1)
        for some_rows, some_lines in zip(rows.split(step), lines.split(step), strict=True):
            self._open.table.write(some_rows, some_lines)

    def delete(self, rows: Tensor) -> None:
        """Delete the lines of ``rows``."""
        if self._open is not None and len(rows):
            self._open.table.delete(rows)

    def saved(self) -> Path | None:
        """A new folder beside the database with a checkpoint of it, which is the caller's to move
        or remove; None where there is no line.

        Raises:
            OSError, RowStoreError: where files cannot be written.
        """
        if self._open is None:
            return None
        folder = self.take_folder().new_folder()
        self._open.store.checkpoint(folder)
        return folder

    def replace(self, checkpoint: Path | None) -> None:
        """Take the lines of a checkpoint, which stays as it is, in place of these; None for none.

        Raises:
            OSError, ValueError, RowStoreError: as ``RocksDBStore.restore``; nothing is changed.
        """
        if checkpoint is None:
            self.clear()
            return
        opened = self._open or _OpenStore(self.take_folder(), self.layout.line_bytes)
        opened.store.restore(checkpoint)
        self._open = opened

    def clear(self) -> None:
        """Delete all lines, with the database."""
        if self._open is not None:
            self._open.remove()
            self._open = None


class _OpenStore:
    """A store in a new folder, which is removed when the object is gone."""

    def __init__(self, scratch: ScratchFolder, line_bytes: int) -> None:
        self._scratch = scratch
        folder = scratch.new_folder()
        store = RocksDBStore(folder)
        self.store, self.folder = store, folder
        self.remove = weakref.finalize(self, _remove, store, folder, os.getpid())
        """Closes the store, and removes its folder."""
        self.table: RowTable = store.table(LINES, line_bytes)


def _remove(store: RocksDBStore, folder: Path, process: int) -> None:
    # Closing writes what is in memory, which nobody wants any more, nor can where the disk is gone.
    with contextlib.suppress(OSError, RowStoreError):
        store.close()
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
