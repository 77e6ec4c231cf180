"""The rows of a group of tables on disk, as lines by their numbers."""

import contextlib
import os
import shutil
import threading
import weakref
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchembed import stores  # whose classes for disks are imported by the first table on one
from torchembed.stores import RowStoreError, RowTable
from torchembed.stores.arguments import MAX_WRITE_BYTES
from torchembed.tables.tiers.line_layout import LineLayout
from torchembed.tables.tiers.scratch_folders import ScratchFolder, scratch_folder

LINES = "rows"
"""The name of the table of lines in the store."""


class AnnouncedLines(NamedTuple):
    """Lines that are to be read ahead."""

    table: "stores.ReadAheadTable"
    number: int

    def retire(self) -> None:
        """Let go of them, and of those that were announced before."""
        self.table.retire(self.number)


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
            ImportError: if rocksdict is not installed.
            StoreInUseError: if another process keeps rows there.
            OSError: if folders cannot be made, read or written.
        """
        if self._scratch is None:
            from torchembed.stores.rocksdb.opening import import_rocksdict

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
            with self._open.lock:
                self._open.table.write(some_rows, some_lines)

    def announce(self, rows: np.ndarray, buffer_bytes: int | None = None) -> AnnouncedLines | None:
        """Have the lines of ``rows``, int64 ``[n]``, read ahead on a thread. Any thread may call
        it; it waits while lines are written.

        Args:
            buffer_bytes: of host memory for lines that were read and not asked for yet; that of the
                first call counts. None: nothing is read where there was none.

        Returns:
            What was announced, to be retired; None where nothing is read.

        Raises:
            Exception: what reading ahead failed with before.
        """
        opened = self._open
        return None if opened is None else opened.announce(rows, buffer_bytes)

    def stop_reading_ahead(self) -> None:
        """Forget what was announced and read ahead, and end the thread; a further announcement
        begins it anew."""
        if self._open is not None:
            self._open.stop_reading_ahead()

    def saved(self) -> Path | None:
        """A new folder beside the database with a checkpoint of it, which is the caller's to move
        or remove; None where there is no line.

        Raises:
            OSError, RowStoreError: if files cannot be written.
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
        with opened.lock:
            opened.stop_reading_ahead()
            opened.store.restore(checkpoint)
        self._open = opened

    def clear(self) -> None:
        """Delete all lines, with the database."""
        if self._open is not None:
            with self._open.lock:
                self._open.remove()
            self._open = None


class _OpenStore:
    """A store in a new folder, which is removed when the object is gone."""

    def __init__(self, scratch: ScratchFolder, line_bytes: int) -> None:
        self._scratch = scratch
        folder = scratch.new_folder()
        store = stores.RocksDBStore(folder)
        self.store, self.folder = store, folder
        self._ahead: list[stores.ReadAheadTable] = []
        """The table once lines are read ahead, alone."""
        self.remove = weakref.finalize(self, _remove, store, folder, os.getpid(), self._ahead)
        """Closes the store, and removes its folder."""
        self.table: RowTable = store.table(LINES, line_bytes)
        self.lock = threading.Lock()
        """Held while lines change, and are announced: what reads ahead must know of every change,
        and not read while the database is replaced."""

    def announce(self, rows: np.ndarray, buffer_bytes: int | None) -> AnnouncedLines | None:
        with self.lock:
            if not self.remove.alive:
                return None
            if not self._ahead:
                if buffer_bytes is None:
                    return None
                size = max(buffer_bytes, self.table.line_bytes)
                self._ahead.append(stores.ReadAheadTable(self.table, size))
                self.table = self._ahead[0]
            (ahead,) = self._ahead
            return AnnouncedLines(ahead, ahead.announce(torch.from_numpy(rows)))

    def stop_reading_ahead(self) -> None:
        for ahead in self._ahead:
            ahead.close()


def _remove(
    store: "stores.RocksDBStore", folder: Path, process: int, ahead: "list[stores.ReadAheadTable]"
) -> None:
    if os.getpid() == process:
        for table in ahead:
            table.close()
    # Closing writes what is in memory, which nobody wants any more, nor can where the disk is gone.
    with contextlib.suppress(OSError, RowStoreError):
        store.close()
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
