"""Stores on disk whose processes are killed, and whose disks and files fail."""

import importlib
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support import store_processes
from tests.support.store_processes import LINE_BYTES, NUM_KEYS, result_of, versions, versions_after
from torchembed.stores import (
    CorruptStoreError,
    LineChunk,
    RocksDBStore,
    RowStoreError,
    StoreInUseError,
)
from torchembed.stores.rocksdb.faults import faults_named

NUM_VERSIONS = 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A closed store with some versions of its lines."""
    folder = tmp_path / "store"
    with RocksDBStore(folder) as store:
        for version in range(1, NUM_VERSIONS + 1):
            store.table("t", LINE_BYTES).write(*store_processes.batch(version))
    return folder


def largest(folder: Path, pattern: str) -> Path:
    return max((folder / "rows").glob(pattern), key=lambda path: path.stat().st_size)


def flip(path: Path, place: float) -> None:
    """Change one bit."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 0x10
    path.write_bytes(content)


def test_a_killed_writer_leaves_whole_batches_and_all_that_it_said_was_written(
    tmp_path: Path,
) -> None:
    """Killed twenty times, from while it opens the store to after some dozen batches."""
    folder, draw = tmp_path / "store", random.Random(0)
    last = 0
    for num_messages in [0, 1, *(draw.randrange(2, 50) for _ in range(18))]:
        running = store_processes.start(store_processes.write_until_killed, folder, last + 1)
        said = [running.next_message() for _ in range(num_messages + 1)][-1]
        running.kill()
        while running.messages.poll():
            try:
                said = running.messages.recv()
            except EOFError:
                break
        with RocksDBStore(folder) as store:
            found = versions(store)
        last = int(found.max())
        assert last in (said, said + 1)
        assert torch.equal(found, versions_after(last))
    assert last > 100
    assert not list((folder / "snapshots").glob("*"))


def test_who_has_the_store_is_named_until_it_is_killed(folder: Path) -> None:
    running = store_processes.start(store_processes.hold, folder)
    pid = running.next_message()
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (folder / "rows").iterdir())
    message = rf"one store at a time may have .*store open, and process {pid} on host .*, since 20"
    for _ in range(2):
        with pytest.raises(StoreInUseError, match=message):
            RocksDBStore(folder)
    after = sorted((path.name, path.stat().st_mtime_ns) for path in (folder / "rows").iterdir())
    assert after == before
    running.kill()
    with RocksDBStore(folder) as store:
        assert torch.equal(versions(store), versions_after(NUM_VERSIONS))


def test_a_store_of_this_process_has_its_folder_until_it_is_closed(folder: Path) -> None:
    with RocksDBStore(folder):
        (folder.parent / "link").symlink_to(folder)
        for path in (folder, folder.parent / "link"):
            with pytest.raises(StoreInUseError, match="and another store of this process does"):
                RocksDBStore(path)
    RocksDBStore(folder.parent / "link").close()


def test_snapshots_of_killed_processes_are_removed_and_others_kept(folder: Path) -> None:
    left = folder / "snapshots" / "of_a_killed_process"
    left.mkdir(parents=True)
    (left / "rows").mkdir()
    with RocksDBStore(folder) as store:
        assert not left.exists()
        snapshot = store.snapshot()
    with RocksDBStore(folder) as store:
        store.table("t", LINE_BYTES).delete(torch.arange(NUM_KEYS))
        assert torch.equal(versions(snapshot), versions_after(NUM_VERSIONS))
        snapshot.close()
    assert list((folder / "snapshots").iterdir()) == []


def check_chunks(chunks: Iterator[LineChunk]) -> None:
    for keys, lines in chunks:
        numbers = lines.view(torch.int64).view(len(keys), -1, 2)
        assert torch.equal(numbers[:, 0, 0], versions_after(NUM_VERSIONS)[keys])


def test_a_snapshot_of_a_snapshot_has_files_of_its_own(folder: Path) -> None:
    with RocksDBStore(folder) as store:
        first = store.snapshot()
        second = first.snapshot()
        first.close()
        (left,) = (folder / "snapshots").iterdir()
        assert list((left / "rows").glob("*.sst"))
        assert torch.equal(versions(second), versions_after(NUM_VERSIONS))
        second.close()
    assert list((folder / "snapshots").iterdir()) == []


@pytest.mark.parametrize("place", [0.01, 0.3, 0.7])
def test_flipped_bits_of_lines_are_never_read(folder: Path, place: float) -> None:
    flip(largest(folder, "*.sst"), place)
    message = r"the store in .*store is not as it was written; restore it .*checksum mismatch"
    lines = torch.zeros(NUM_KEYS, LINE_BYTES, dtype=torch.uint8)
    with RocksDBStore(folder) as store:
        table = store.table("t", LINE_BYTES)
        with pytest.raises(CorruptStoreError, match=message):
            table.read(torch.arange(NUM_KEYS), lines)
        for max_rows in (7, 5000):
            with pytest.raises(CorruptStoreError, match=message):
                check_chunks(table.chunks(max_rows))
        with pytest.raises(CorruptStoreError, match=message):
            table.num_rows()


@pytest.mark.parametrize(
    ("pattern", "place"), [("*.sst", 0.9999), ("MANIFEST-*", 0.5), ("CURRENT", 0.5)]
)
def test_flipped_bits_of_what_describes_lines_are_an_error(
    folder: Path, pattern: str, place: float
) -> None:
    flip(largest(folder, pattern), place)
    for _ in range(2):
        with pytest.raises(CorruptStoreError, match=r"is not as it was written; restore it from a"):
            RocksDBStore(folder)


@pytest.mark.parametrize("place", [0.01, 0.5, 0.99])
def test_flipped_bits_of_the_log_are_an_error(tmp_path: Path, place: float) -> None:
    """The log has what was written since the last file of lines; nothing after the bit is lost
    without a word."""
    running = store_processes.start(store_processes.write_and_wait, tmp_path / "store", 3)
    assert running.next_message() == 3
    running.kill()
    flip(largest(tmp_path / "store", "*.log"), place)
    with pytest.raises(CorruptStoreError, match=r"is not as it was written.*Corruption"):
        RocksDBStore(tmp_path / "store")


@pytest.mark.parametrize("pattern", ["*.sst", "MANIFEST-*", "CURRENT"])
def test_missing_files_are_an_error(folder: Path, pattern: str) -> None:
    others = sorted((folder / "rows").glob("*.sst"))
    lost = largest(folder, pattern)
    content = lost.read_bytes()
    lost.unlink()
    with pytest.raises(CorruptStoreError, match=r"is not as it was written; restore it from a"):
        RocksDBStore(folder)
    # Nothing was made in place of what is missing.
    lost.write_bytes(content)
    assert sorted((folder / "rows").glob("*.sst")) == others
    with RocksDBStore(folder) as store:
        assert torch.equal(versions(store), versions_after(NUM_VERSIONS))


def test_a_limit_on_files_is_an_error_that_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    last, told = result_of(store_processes.write_up_to_a_limit, folder, 400_000)
    assert last > 0
    assert told[0].startswith("OSError [Errno 27] File too large: raise the limit on the size of")
    assert "File too large" in told[1]
    with RocksDBStore(folder) as store:
        assert torch.equal(versions(store), versions_after(last))
        store.table("t", LINE_BYTES).write(*store_processes.batch(last + 1))
        assert torch.equal(versions(store), versions_after(last + 1))


def test_a_full_disk_is_an_error_that_loses_nothing_until_there_is_room(tmp_path: Path) -> None:
    result = result_of(store_processes.fill_a_disk, tmp_path)
    if result is None:
        pytest.skip("needs a file system of its own, which this machine does not let tests mount")
    last, told, found = result
    assert last > 0
    message = "OSError [Errno 28] No space left on device: make room there, and the next write"
    assert len(told) == 4
    assert all(text.startswith(message) for text in told), told
    assert found == [versions_after(last + 1).tolist()] * 2


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"path must be in a folder that exists; make it"):
        RocksDBStore(tmp_path / "missing" / "store")
    assert not (tmp_path / "missing").exists()
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="path must be a folder, and is a file; give"):
        RocksDBStore(tmp_path / "file")
    # Pytest's own folders can be seen by their user alone.
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o555)
        told = result_of(store_processes.open_without_rights, Path(name))
        assert "PermissionError [Errno 13] path must be a folder that this process may read" in told
        told = result_of(store_processes.open_without_rights, Path(name) / "store")
        assert "PermissionError [Errno 13] Permission denied" in told
        os.chmod(name, 0o755)


def test_a_folder_of_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("kept")
    with pytest.raises(
        RowStoreError, match=r"path must be a store, or an empty folder, and .*notes"
    ):
        RocksDBStore(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "kept"


def test_a_store_of_a_later_release_is_refused(folder: Path) -> None:
    rewrite_record(folder, b"\0\0\0\0", b'{"format": 2}')
    with pytest.raises(RowStoreError, match="has format 2, and this release knows 1; open it with"):
        RocksDBStore(folder)


def test_a_database_that_no_store_made_is_refused(folder: Path) -> None:
    rewrite_record(folder, b"\0\0\0\0", b"something else")
    with pytest.raises(CorruptStoreError, match="must be one that a store made, and lacks its rec"):
        RocksDBStore(folder)
    with pytest.raises(CorruptStoreError, match="must be one that a store made"):
        RocksDBStore(folder)


def test_lines_of_another_length_are_not_read(folder: Path) -> None:
    rewrite_record(folder, b"\0\0\0\0t", b'{"number": 1, "line_bytes": 1000}')
    with RocksDBStore(folder) as store:
        table = store.table("t", 1000)
        message = "lines of table 't' in .* must have 1000 bytes, and some have 1024; restore"
        with pytest.raises(CorruptStoreError, match=message):
            table.read(torch.arange(3), torch.zeros(3, 1000, dtype=torch.uint8))
        with pytest.raises(CorruptStoreError, match=message):
            list(table.chunks(5))


def rewrite_record(folder: Path, key: bytes, value: bytes) -> None:
    rocksdict = importlib.import_module("rocksdict")
    db = rocksdict.Rdict(str(folder / "rows"), rocksdict.Options(raw_mode=True))
    db.put(key, value)
    db.close()


def test_a_fork_is_told_to_leave_the_store_alone(tmp_path: Path) -> None:
    own, another = result_of(store_processes.fork_with_a_store, tmp_path / "store")
    assert "was opened by process" in own
    assert "of which this one is a fork; use it there" in own
    assert "another cannot be opened here, since process" in another
    assert "start this process by 'spawn' or 'forkserver'" in another


@pytest.fixture
def no_rocksdict() -> Iterator[None]:
    kept = sys.modules.get("rocksdict")
    sys.modules["rocksdict"] = None  # type: ignore[assignment]
    yield
    del sys.modules["rocksdict"]
    if kept is not None:
        sys.modules["rocksdict"] = kept


@pytest.mark.usefixtures("no_rocksdict")
def test_what_to_install_is_said_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"rocksdict, .*; pip install 'torchembed\[disk\]'"):
        RocksDBStore(tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_other_errors_of_rocksdb_keep_their_text(tmp_path: Path) -> None:
    message = "fails, and RocksDB says why: Busy: text"
    with pytest.raises(RowStoreError, match=message), faults_named(tmp_path):
        raise Exception("Busy: text")  # noqa: TRY002 - what rocksdict raises
    with pytest.raises(KeyError), faults_named(tmp_path):
        raise KeyError("left as it is")
