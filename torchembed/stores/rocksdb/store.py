"""Tables of lines by key in a folder on disk."""

import contextlib
import errno
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from torchembed.stores.arguments import check_same_line, check_table
from torchembed.stores.errors import CorruptStoreError, RowStoreError, StoreInUseError
from torchembed.stores.folder_lock import FolderLock
from torchembed.stores.rocksdb.database import SNAPSHOTS, Database
from torchembed.stores.rocksdb.files import point_to_files, sync_to_disk
from torchembed.stores.rocksdb.opening import import_rocksdict
from torchembed.stores.rocksdb.options import RocksDBOptions
from torchembed.stores.rocksdb.table import RocksDBTable
from torchembed.stores.rocksdb.table_records import ROWS


class RocksDBStore:
    """Tables of lines by key (:class:`~torchembed.stores.RowStore`) in a folder.

    Needs the package rocksdict (``pip install 'torchembed[disk]'``).

    A call of ``write`` or ``delete`` that has returned survives the end of the process, however it
    ends; after :meth:`sync`, or with ``sync_writes``, also that of the machine. Lines are checked
    against checksums as they are read. After an error of the disk the store can still be read, and
    writes fail until there is room: the next one then opens the database anew, while readers wait.

    Besides its buffers (:class:`~torchembed.stores.RocksDBOptions`) a store takes memory in which
    it finds where lines are, up to six bytes a row.

    Other threads of Python run while RocksDB reads, syncs, or takes no writes until it has moved
    lines to sorted files; not while it writes. A store is of the process that opened it: one that
    is forked from that can neither use it nor open others.

    Args:
        path: a folder, made where there is none in a folder that exists. It holds the store alone.
        options: how it is kept.

    Raises:
        ImportError: where rocksdict is not installed.
        StoreInUseError: where another process, or another store of this one, has the folder open.
        CorruptStoreError: where the folder's files are not as they were written.
        RowStoreError: where the folder holds something else, or a later release wrote it.
        OSError: where the folder cannot be made, read or written.
    """

    def __init__(self, path: str | os.PathLike[str], options: RocksDBOptions | None = None) -> None:
        import_rocksdict()
        folder = Path(path)
        _make_folder(folder)
        self._database = Database(folder, options or RocksDBOptions(), is_read_only=False)
        self._snapshots = folder / SNAPSHOTS
        try:
            _remove_old_snapshots(self._snapshots)
        except BaseException:
            self.close()
            raise

    def table(self, name: str, line_bytes: int) -> RocksDBTable:
        """The table ``name`` with lines of ``line_bytes`` bytes, made if there is none.

        Raises:
            ValueError: if the table has lines of another length.
            RowStoreError: if the store is only read and has no such table.
        """
        check_table(name, line_bytes)
        database = self._database
        with database.lock:
            database.check_open()
            if name not in database.records:
                if database.is_read_only and not database.is_snapshot:
                    raise RowStoreError(
                        f"the store in {database.store} is only read, and has no table {name!r}; "
                        f"it has {sorted(database.records)}"
                    )
                database.check_writable()
                database.add_table(name, line_bytes)
            record = database.records[name]
        check_same_line(str(database.folder), name, record.line_bytes, line_bytes)
        return RocksDBTable(database, name, line_bytes)

    def tables(self) -> dict[str, int]:
        """The ``line_bytes`` of each table, by its name."""
        with self._database.lock:
            self._database.check_open()
            return {name: record.line_bytes for name, record in self._database.records.items()}

    def sync(self) -> None:
        """Return when all that was written before survives the end of the machine."""
        self._database.sync()

    def snapshot(self) -> "RocksDBStore":
        """A store of all tables as they are now, which cannot be written.

        It has a folder of its own in the store's, whose files are the same as the store's where
        these do not change. The folder is removed when the snapshot is closed, or, where the
        process ends before that, when the store is opened again.
        """
        self._database.check_open()
        self._snapshots.mkdir(exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=self._snapshots))
        try:
            self._database.link_to(folder / ROWS)
            return _Snapshot(folder, self._database.options)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Make a folder of all tables as they are now, for a ``RocksDBStore`` to open later.

        Its files are the same as this store's where these do not change, and need no room of their
        own on the same file system. It appears under its name when it is whole and on disk.

        Raises:
            FileExistsError: where there is something under ``path``.
        """
        path = Path(path)
        if path.exists():
            raise FileExistsError(
                errno.EEXIST, "path must be free; remove what is there, or give another", str(path)
            )
        partial = Path(tempfile.mkdtemp(prefix=f"{path.name}.partial-", dir=path.parent))
        try:
            partial.chmod(self._database.folder.stat().st_mode)
            self._database.link_to(partial / ROWS)
            # RocksDB's own are on disk, and rocksdict's is not.
            for file in (partial / ROWS).glob("*.json"):
                sync_to_disk(file)
            sync_to_disk(partial)
            partial.rename(path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync_to_disk(path.parent)

    def restore(self, checkpoint: str | os.PathLike[str]) -> None:
        """Take all tables of a :meth:`checkpoint` in place of those that are here, whole or not at
        all, also where the process ends meanwhile. Tables that it lacks are empty then.

        The checkpoint stays as it is, and its lines need no room of their own on the same file
        system. No other thread may be using the store or its tables, which stay valid.

        Raises:
            FileNotFoundError: where there is no checkpoint.
            CorruptStoreError: where its files are not as they were written.
            ValueError: where a table of both has lines of another length there.
            RowStoreError, OSError: as for opening a store. Nothing is changed in any case.
        """
        self._database.replace(_checked_checkpoint(checkpoint))

    @staticmethod
    def open_checkpoint(
        checkpoint: str | os.PathLike[str], options: RocksDBOptions | None = None
    ) -> "RocksDBStore":
        """The tables of a :meth:`checkpoint`, which are read and cannot be written.

        The checkpoint stays as it is, and any number of processes may have it open. A folder for
        temporary files has links to it until the store is closed.

        Raises:
            FileNotFoundError: where there is no checkpoint.
            CorruptStoreError: where its files are not as they were written.
            RowStoreError, OSError: as for opening a store.
        """
        import_rocksdict()
        return _opened_to_read(_checked_checkpoint(checkpoint), options or RocksDBOptions())

    @staticmethod
    def open_read_only(
        path: str | os.PathLike[str], options: RocksDBOptions | None = None
    ) -> "RocksDBStore":
        """The tables of a store, which are read and cannot be written.

        Any number of processes may have it open so, and none to write it meanwhile. The folder
        stays as it is; one for temporary files has links to it until the store is closed.

        Raises:
            FileNotFoundError: where there is no store.
            StoreInUseError: where another one has the folder open to write, or this process has it
                open already.
            CorruptStoreError, RowStoreError, OSError: as for opening a store.
        """
        import_rocksdict()
        folder = Path(path)
        if not (folder / ROWS).is_dir():
            raise FileNotFoundError(errno.ENOENT, "path must be a folder of a store", str(path))
        lock = FolderLock(folder, is_shared=True)
        try:
            return _opened_to_read(folder, options or RocksDBOptions(), lock)
        except BaseException:
            lock.release()
            raise

    def close(self) -> None:
        """Close the database; the rows stay in the folder."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Snapshot(RocksDBStore):
    """A store in a folder that is its own, and goes with it."""

    def __init__(
        self,
        folder: Path,
        options: RocksDBOptions,
        store: Path | None = None,
        lock: FolderLock | None = None,
    ) -> None:
        self._lock = lock
        self._database = Database(folder, options, is_read_only=True, store=store)
        # Snapshots of this one stand beside it, since its folder goes when it is closed.
        self._snapshots = folder.parent

    def close(self) -> None:
        was_open = self._database.is_open
        super().close()
        if was_open:
            shutil.rmtree(self._database.folder, ignore_errors=True)
            if self._lock is not None:
                self._lock.release()


def _opened_to_read(
    store: Path, options: RocksDBOptions, lock: FolderLock | None = None
) -> RocksDBStore:
    """The tables of the folder ``store``, whose files nobody changes while it is read.

    Args:
        lock: of that folder, which is released when the result is closed.
    """
    folder = Path(tempfile.mkdtemp(prefix="torchembed-rows-"))
    try:
        point_to_files(store / ROWS, folder / ROWS)
        return _Snapshot(folder, options, store=store, lock=lock)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _checked_checkpoint(path: str | os.PathLike[str]) -> Path:
    found = Path(path)
    if not found.is_dir():
        raise FileNotFoundError(
            errno.ENOENT, "checkpoint must be a folder that checkpoint() made", str(path)
        )
    if not (found / ROWS).is_dir():
        raise CorruptStoreError(
            f"checkpoint {path} must be a folder that checkpoint() made, and lacks its folder "
            f"{ROWS!r}"
        )
    return found


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(exist_ok=True)
    except FileNotFoundError:
        raise FileNotFoundError(
            errno.ENOENT, "path must be in a folder that exists; make it", str(path.parent)
        ) from None
    except FileExistsError:
        raise NotADirectoryError(
            errno.ENOTDIR, "path must be a folder, and is a file; give another", str(path)
        ) from None
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(
            errno.EACCES, "path must be a folder that this process may read and write", str(path)
        )


def _remove_old_snapshots(snapshots: Path) -> None:
    """Remove the snapshots of processes that have ended."""
    for snapshot in snapshots.glob("*"):
        # One in use is of a store that was closed before it.
        with contextlib.suppress(StoreInUseError):
            FolderLock(snapshot).release()
            shutil.rmtree(snapshot, ignore_errors=True)
