"""A folder with a database of RocksDB, opened by one process."""

import concurrent.futures
import contextlib
import ctypes
import json
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from torchembed.stores.arguments import check_same_line
from torchembed.stores.errors import RowStoreError
from torchembed.stores.folder_lock import LOCK_FILE, FolderLock
from torchembed.stores.rocksdb.faults import faults_named
from torchembed.stores.rocksdb.files import share_files, sync_to_disk
from torchembed.stores.rocksdb.gate import Gate
from torchembed.stores.rocksdb.opening import import_rocksdict, opened
from torchembed.stores.rocksdb.options import RocksDBOptions
from torchembed.stores.rocksdb.room import check_room
from torchembed.stores.rocksdb.table_records import (
    FORMAT,
    ROWS,
    TableRecord,
    prefix,
    read_records,
    record_key,
)
from torchembed.stores.rocksdb.writes import write_whole

if TYPE_CHECKING:
    import rocksdict

_T = TypeVar("_T")

SNAPSHOTS = "snapshots"

_RESTORED, _REPLACED = f"{ROWS}.restored", f"{ROWS}.replaced"
"""A database that is to take the place of the one in ``ROWS``, and one that another took the place
of."""


class Database:
    """The database in ``folder / "rows"``, and the lock of ``folder``, until :meth:`close`.

    Raises:
        StoreInUseError, CorruptStoreError, RowStoreError, OSError: as ``RocksDBStore`` says.
    """

    def __init__(
        self,
        folder: Path,
        options: RocksDBOptions,
        *,
        is_read_only: bool,
        store: Path | None = None,
    ) -> None:
        self.folder = folder
        self.store = store or folder
        """What errors name."""
        self.is_read_only = is_read_only
        self.options = options
        self.lock = threading.RLock()
        """Held while tables are made."""
        self._process = os.getpid()
        _check_not_forked(folder)
        self._folder_lock = FolderLock(folder)
        self._is_closed = False
        self._db: rocksdict.Rdict | None = None
        """None once it is closed, and where it could not be opened anew."""
        self._gate = Gate()
        self._has_failed = False
        """True from a write that failed until the database was opened anew."""
        self._threads = concurrent.futures.ThreadPoolExecutor(
            options.num_read_threads, "torchembed: lines of a database"
        )
        try:
            if not is_read_only:
                _end_replacement(folder)
                _make_where_missing(folder, options)
            self._db = opened(folder / ROWS, options, is_read_only=is_read_only, store=self.store)
            self.records = read_records(self._db, self.store)
        except BaseException:
            if self._db is not None:
                self._db.close()
            self._folder_lock.release()
            raise
        _open_databases.add(self)

    @property
    def is_snapshot(self) -> bool:
        """True where the folder is a snapshot's own, and not links to another store's files."""
        return self.is_read_only and self.store == self.folder

    @property
    def is_open(self) -> bool:
        """True while this process has the database open."""
        return not self._is_closed and self._process == os.getpid()

    def check_open(self) -> None:
        """Raise ``RowStoreError`` where the database is closed, or another process opened it."""
        if self._is_closed:
            raise RowStoreError(f"the store in {self.store} is closed; open it again")
        if self._process != os.getpid():
            raise RowStoreError(
                f"the store in {self.store} was opened by process {self._process}, of which this "
                "one is a fork; use it there, or open it in this process alone"
            )

    @contextlib.contextmanager
    def used(self) -> Iterator["rocksdict.Rdict"]:
        """Context in which the database itself stays open, unless :meth:`check_open` raises.

        It may not be entered inside itself, and iterators of the database must be gone at its end.
        """
        with self._gate.shared():
            self.check_open()
            if self._db is None:
                raise RowStoreError(f"the store in {self.store} could not be opened anew; mend it")
            yield self._db

    def for_each(self, read: Callable[[_T], None], parts: Sequence[_T]) -> None:
        """Call ``read`` for each of ``parts``, on threads where they are several, and return when
        all have ended.

        Raises:
            Exception: what the first of the calls that failed raised.
        """
        if len(parts) > 1:
            running = [self._threads.submit(read, part) for part in parts]
            concurrent.futures.wait(running)
            for call in running:
                call.result()
        elif parts:
            read(parts[0])

    def check_writable(self) -> None:
        """Raise ``RowStoreError`` for a snapshot, and where :meth:`check_open` does."""
        self.check_open()
        if self.is_read_only:
            raise RowStoreError("a snapshot cannot be written; write to the store it was taken of")

    def add_table(self, name: str, line_bytes: int) -> None:
        """Add the record of a table."""
        number = 1 + max((record.number for record in self.records.values()), default=0)
        record = TableRecord(number, line_bytes)
        key, value = record_key(name), json.dumps(record._asdict()).encode()
        self.write(lambda batch: batch.put(key, value))
        self.records[name] = record

    def drop_table(self, name: str) -> None:
        """Delete the record of a table, and all of its lines."""
        with self.lock:
            number = self.record(name).number

            def fill(batch: "rocksdict.WriteBatch") -> None:
                batch.delete_range(prefix(number), prefix(number + 1))
                batch.delete(record_key(name))

            self.write(fill)
            del self.records[name]

    def record(self, name: str) -> TableRecord:
        """The record of a table, unless it was dropped, which raises ``RowStoreError``."""
        record = self.records.get(name)
        if record is None:
            raise RowStoreError(f"table {name!r} was dropped; open it again by table()")
        return record

    def write(self, fill: "Callable[[rocksdict.WriteBatch], None]") -> None:
        """Write what ``fill`` puts into a batch, whole or not at all; it may be called again.

        Where a write failed before, the database is opened anew first, once there is room.
        """
        self.check_writable()
        if self._has_failed:
            self._open_anew()
        with self.used() as rows:
            try:
                write_whole(rows, self.store, fill)
            except (OSError, RowStoreError):
                self._has_failed = True
                raise
        # Not by an option of the write, which would hold Python's global lock meanwhile.
        if self.options.sync_writes:
            self.sync()

    def sync(self) -> None:
        """Return when all that was written is on disk, as a snapshot always is."""
        with self.used() as rows:
            if not self.is_read_only:
                with faults_named(self.store):
                    rows.flush_wal(True)

    def _open_anew(self) -> None:
        """Open the database anew, which RocksDB asks for before it writes again. Readers wait.

        Raises:
            OSError: where there is no room yet; nothing has changed then.
            RowStoreError, OSError: where it cannot be opened to write; it is read all the same.
        """
        path = self.folder / ROWS
        check_room(self.folder, path)
        with self._gate.alone():
            if not self._has_failed:
                return
            db, self._db = self._db, None
            if db is not None:
                # It says once more that a write failed; what was written before is in its log.
                with contextlib.suppress(OSError, RowStoreError), faults_named(self.store):
                    db.close()
                del db
            try:
                self._db = opened(path, self.options, store=self.store)
            except (OSError, RowStoreError):
                self._db = opened(path, self.options, is_read_only=True, store=self.store)
                raise
            self._has_failed = False

    def link_to(self, path: Path) -> None:
        """Make a copy of the database in a new folder, of hard links where that is possible."""
        rocksdict = import_rocksdict()
        with self.used() as rows, faults_named(self.store):
            if not self.is_read_only:
                # Or the checkpoint does, holding Python's global lock.
                rows.flush()
            rocksdict.Checkpoint(rows).create_checkpoint(str(path))

    def replace(self, checkpoint: Path) -> None:
        """Take the database of a checkpoint in place of this one, whole or not at all; tables that
        it lacks are empty then.

        Raises:
            ValueError: where a table of both has lines of another length there.
            CorruptStoreError, RowStoreError, OSError: where the checkpoint cannot be opened, or
                not be had here. Nothing is changed then.
        """
        self.check_writable()
        with self.used() as rows:
            before = self.records
        path, restored, replaced = (self.folder / n for n in (ROWS, _RESTORED, _REPLACED))
        try:
            share_files(checkpoint / ROWS, restored)
            db = opened(restored, self.options, store=checkpoint)
            try:
                records = read_records(db, checkpoint)
                for name in records.keys() & before.keys():
                    made_with, wanted = records[name].line_bytes, before[name].line_bytes
                    check_same_line(str(checkpoint), name, made_with, wanted)
            finally:
                db.close()
        except BaseException:
            shutil.rmtree(restored, ignore_errors=True)
            raise
        with faults_named(self.store):
            rows.close()
        path.rename(replaced)
        restored.rename(path)
        sync_to_disk(self.folder)
        self._db, self.records = opened(path, self.options), records
        shutil.rmtree(replaced, ignore_errors=True)
        for name in before.keys() - records.keys():
            self.add_table(name, before[name].line_bytes)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        db, self._db = self._db, None
        if self._process != os.getpid():
            if db is not None:
                _never_release(db)
            return
        _open_databases.discard(self)
        self._threads.shutdown()
        try:
            if db is not None:
                with faults_named(self.store):
                    db.close()
        finally:
            self._folder_lock.release()


def _end_replacement(folder: Path) -> None:
    """Go on with the old database where the process ended before another had taken its place."""
    if (folder / _REPLACED).exists() and not (folder / ROWS).exists():
        (folder / _REPLACED).rename(folder / ROWS)
    for left in (_RESTORED, _REPLACED):
        shutil.rmtree(folder / left, ignore_errors=True)


def _make_where_missing(folder: Path, options: RocksDBOptions) -> None:
    """Make an empty database where the folder has none, at once or not at all.

    RocksDB would make one also where it finds the files of another without their beginning, and
    remove these.
    """
    if (folder / ROWS).exists():
        return
    partial = folder / f"{ROWS}.partial"
    others = set(os.listdir(folder)) - {LOCK_FILE, SNAPSHOTS, partial.name}
    if others:
        raise RowStoreError(
            f"path must be a store, or an empty folder, and {folder} holds {min(others)!r}; give "
            "another folder"
        )
    shutil.rmtree(partial, ignore_errors=True)
    db = opened(partial, options, create=True)
    with faults_named(folder):
        db.put(prefix(0), json.dumps({"format": FORMAT}).encode())
        db.close()
    partial.rename(folder / ROWS)
    # Or the machine could end with rows that are on disk in a folder that is not.
    for changed in (folder, folder.resolve().parent):
        sync_to_disk(changed)


_user: list[int] = []
"""The process that uses RocksDB here, which none that is forked from it can do."""


def _check_not_forked(folder: Path) -> None:
    """Raise where RocksDB was used before this process was forked.

    RocksDB would wait for ever for its threads, which only the parent has.
    """
    if _user and _user != [os.getpid()]:
        raise RowStoreError(
            f"a store in {folder} cannot be opened here, since process {_user[0]}, of which this "
            "one is a fork, had opened one before; start this process by 'spawn' or 'forkserver'"
        )
    _user[:] = [os.getpid()]


_open_databases: weakref.WeakSet[Database] = weakref.WeakSet()


def _never_release(db: "rocksdict.Rdict") -> None:
    """Keep a database of the parent process from being closed in this forked one.

    Closing waits for threads of RocksDB, which only the parent has.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(db))


def _keep_databases_of_parent() -> None:
    for database in _open_databases:
        if database._db is not None:
            _never_release(database._db)


os.register_at_fork(after_in_child=_keep_databases_of_parent)
