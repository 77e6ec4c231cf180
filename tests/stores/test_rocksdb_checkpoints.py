"""Checkpoints of stores on disk, and stores that are restored from them."""

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support import store_processes
from tests.support.store_processes import LINE_BYTES, NUM_KEYS, SMALL, versions, versions_after
from torchembed.stores import CorruptStoreError, RocksDBStore, RowStoreError, StoreInUseError

SAVED, LATER = 30, 55


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint ``saved`` of ``SAVED`` versions, and the store, which has ``LATER`` ones."""
    with RocksDBStore(tmp_path / "store", SMALL) as store:
        write(store, 1, SAVED)
        store.checkpoint(tmp_path / "saved")
        write(store, SAVED + 1, LATER)
    return tmp_path


@pytest.fixture
def another_file_system() -> Iterator[Path]:
    memory = Path("/dev/shm")
    here = Path(tempfile.gettempdir())
    if not os.access(memory, os.W_OK) or memory.stat().st_dev == here.stat().st_dev:
        pytest.skip("needs a second file system, as /dev/shm is elsewhere")
    made = Path(tempfile.mkdtemp(dir=memory))
    yield made
    shutil.rmtree(made)


def write(store: RocksDBStore, first: int, last: int) -> None:
    table = store.table("t", LINE_BYTES)
    for version in range(first, last + 1):
        table.write(*store_processes.batch(version))


def files(folder: Path) -> list[tuple[str, int, int, bytes]]:
    """Everything below a folder, but for how many names a file has."""
    found = []
    for path in sorted(folder.rglob("*")):
        state, content = path.stat(), b"" if path.is_dir() else path.read_bytes()
        found.append((str(path), state.st_mtime_ns, state.st_ino, content))
    return found


def test_a_store_is_restored_and_its_tables_stay_valid(folder: Path) -> None:
    before = files(folder / "saved")
    with RocksDBStore(folder / "store", SMALL) as store:
        table, other = store.table("t", LINE_BYTES), store.table("later", 3)
        other.write(torch.tensor([5]), torch.ones(1, 3, dtype=torch.uint8))
        snapshot = store.snapshot()
        for _ in range(2):
            store.restore(folder / "saved")
            assert torch.equal(versions(store), versions_after(SAVED))
            assert other.num_rows() == 0
            table.write(*store_processes.batch(SAVED + 1))
            assert torch.equal(versions(store), versions_after(SAVED + 1))
            assert store.tables() == {"t": LINE_BYTES, "later": 3}
        assert torch.equal(versions(snapshot), versions_after(LATER))
        snapshot.close()
        other.write(torch.tensor([5]), torch.ones(1, 3, dtype=torch.uint8))
    with RocksDBStore(folder / "store") as store:
        assert torch.equal(versions(store), versions_after(SAVED + 1))
        assert store.table("later", 3).num_rows() == 1
    assert files(folder / "saved") == before
    assert sorted(p.name for p in (folder / "store").iterdir()) == ["lock", "rows", "snapshots"]


def test_tables_have_other_numbers_in_a_checkpoint(tmp_path: Path) -> None:
    line, key = torch.ones(1, 2, dtype=torch.uint8), torch.tensor([1])
    with RocksDBStore(tmp_path / "a") as store:
        store.table("x", 2).write(key, line)
        store.table("y", 2).write(key, line * 2)
        store.checkpoint(tmp_path / "saved")
    with RocksDBStore(tmp_path / "b") as store:
        y, x = store.table("y", 2), store.table("x", 2)
        store.restore(tmp_path / "saved")
        for table, value in ((x, 1), (y, 2)):
            (chunk,) = table.chunks(10)
            assert chunk.lines.tolist() == [[value, value]]


def test_files_of_lines_are_shared(tmp_path: Path) -> None:
    def numbers(folder: Path) -> set[int]:
        return {path.stat().st_ino for path in (folder / "rows").glob("*.sst")}

    with RocksDBStore(tmp_path / "store") as store:
        write(store, 1, SAVED)
        store.checkpoint(tmp_path / "saved")
        shared = numbers(tmp_path / "saved")
        assert shared == numbers(tmp_path / "store")
        store.table("t", LINE_BYTES).delete(torch.arange(NUM_KEYS))
        store.restore(tmp_path / "saved")
        assert numbers(tmp_path / "store") == shared
        assert torch.equal(versions(store), versions_after(SAVED))


def test_other_file_systems_get_copies(folder: Path, another_file_system: Path) -> None:
    with RocksDBStore(folder / "store", SMALL) as store:
        store.checkpoint(another_file_system / "saved")
        store.restore(folder / "saved")
        assert torch.equal(versions(store), versions_after(SAVED))
        store.restore(another_file_system / "saved")
        assert torch.equal(versions(store), versions_after(LATER))
    shutil.rmtree(folder / "store")
    with RocksDBStore.open_checkpoint(another_file_system / "saved") as store:
        assert torch.equal(versions(store), versions_after(LATER))
    assert [path.name for path in another_file_system.iterdir()] == ["saved"]


def test_a_checkpoint_is_read_as_it_is_by_several_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "temporary"))
    before = files(folder / "saved")
    for path in (folder / "saved", folder / "saved" / "rows"):
        path.chmod(0o555)
    with (
        RocksDBStore.open_checkpoint(folder / "saved") as one,
        RocksDBStore.open_checkpoint(folder / "saved") as other,
        one.snapshot() as snapshot,
    ):
        for store in (one, other, snapshot):
            assert torch.equal(versions(store), versions_after(SAVED))
            with pytest.raises(RowStoreError, match="a snapshot cannot be written"):
                store.table("t", LINE_BYTES).write(*store_processes.batch(1))
    for path in (folder / "saved", folder / "saved" / "rows"):
        path.chmod(0o755)
    assert files(folder / "saved") == before
    assert list((folder / "temporary").iterdir()) == []


def test_a_store_is_read_by_several_processes_at_once_and_written_by_none(folder: Path) -> None:
    path, expected = folder / "store", versions_after(LATER)
    before = files(path)
    other = store_processes.start(store_processes.hold_to_read, path)
    assert other.next_message() == expected.tolist()
    with RocksDBStore.open_read_only(path) as store:
        assert torch.equal(versions(store), expected)
        with pytest.raises(RowStoreError, match="a snapshot cannot be written"):
            store.table("t", LINE_BYTES).delete(torch.tensor([1]))
        with pytest.raises(RowStoreError, match=r"only read, and has no table 'x'; it has \['t'\]"):
            store.table("x", LINE_BYTES)
        with pytest.raises(StoreInUseError, match="another store of this process does"):
            RocksDBStore.open_read_only(path)
    assert files(path) == before
    with pytest.raises(StoreInUseError, match=r"one store at a time may have .* another process"):
        RocksDBStore(path)
    other.kill()
    with RocksDBStore(path), pytest.raises(StoreInUseError, match="another store of this process"):
        RocksDBStore.open_read_only(path)
    with pytest.raises(FileNotFoundError, match="path must be a folder of a store"):
        RocksDBStore.open_read_only(folder)


def largest(pattern: str) -> Callable[[Path], Path]:
    return lambda folder: max((folder / "rows").glob(pattern), key=lambda p: p.stat().st_size)


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [
        ("*.sst", "removed"),
        ("*.sst", "cut off"),
        ("MANIFEST-*", "removed"),
        ("CURRENT", "removed"),
        ("CURRENT", "cut off"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_store_stays(
    folder: Path, pattern: str, damage: str
) -> None:
    file = largest(pattern)(folder / "saved")
    content = file.read_bytes()
    file.unlink()
    if damage == "cut off":
        file.write_bytes(content[:-5])
    with RocksDBStore(folder / "store", SMALL) as store:
        for use in (store.restore, RocksDBStore.open_checkpoint):
            with pytest.raises(CorruptStoreError, match=r"the store in .*saved is not as it was"):
                use(folder / "saved")
        assert torch.equal(versions(store), versions_after(LATER))
        write(store, LATER + 1, LATER + 1)
    with RocksDBStore(folder / "store") as store:
        assert torch.equal(versions(store), versions_after(LATER + 1))
    assert not (folder / "store" / "rows.restored").exists()


def test_folders_that_are_no_checkpoint(folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "other" / "rows").mkdir(parents=True)
    with RocksDBStore(folder / "store") as store:
        for use in (store.restore, RocksDBStore.open_checkpoint):
            with pytest.raises(FileNotFoundError, match="checkpoint must be a folder that checkpo"):
                use(folder / "missing")
            with pytest.raises(CorruptStoreError, match=r"empty must be a folder .* lacks its"):
                use(folder / "empty")
            with pytest.raises(CorruptStoreError, match=r"the store in .*other is not as it was"):
                use(folder / "other")
        assert torch.equal(versions(store), versions_after(LATER))


def test_lines_of_another_length_are_not_restored(folder: Path) -> None:
    with RocksDBStore(folder / "short") as store:
        table = store.table("t", 8)
        table.write(torch.tensor([1]), torch.ones(1, 8, dtype=torch.uint8))
        with pytest.raises(ValueError, match=r"line_bytes of table 't' must be 1024, .*saved, got"):
            store.restore(folder / "saved")
        assert table.num_rows() == 1


def test_a_checkpoint_is_whole_or_not_there_when_its_writer_is_killed(tmp_path: Path) -> None:
    draw, num_unfinished, attempt = random.Random(0), 0, 0
    # Some are killed within a checkpoint, sooner or later.
    while attempt < 8 or num_unfinished == 0:
        attempt += 1
        assert attempt < 100
        folder = tmp_path / str(attempt)
        folder.mkdir()
        running = store_processes.start(store_processes.write_and_checkpoint_until_killed, folder)
        last = 0
        for _ in range(draw.randrange(1, 6)):
            last = running.next_message()
        running.process.join(draw.uniform(0, 0.02))
        running.kill()
        for saved in folder.glob("saved-*"):
            if ".partial-" in saved.name:
                num_unfinished += 1
                continue
            version = int(saved.name.removeprefix("saved-"))
            with RocksDBStore.open_checkpoint(saved) as store:
                assert torch.equal(versions(store), versions_after(version))
        assert all((folder / f"saved-{version}").exists() for version in range(1, last))


def test_a_store_is_the_old_one_or_the_restored_one_when_its_process_is_killed(
    tmp_path: Path,
) -> None:
    saved = [3, 9]
    with RocksDBStore(tmp_path / "store", SMALL) as store:
        for first, last in ((1, 3), (4, 9)):
            write(store, first, last)
            store.checkpoint(tmp_path / f"saved-{last}")
    draw, found, attempt = random.Random(0), set(), 0
    # Each of the two is found, sooner or later.
    while attempt < 10 or found != set(saved):
        attempt += 1
        assert attempt < 100
        running = store_processes.start(store_processes.restore_until_killed, tmp_path, saved)
        for _ in range(draw.randrange(1, 8)):
            running.next_message()
        running.process.join(draw.uniform(0, 0.03))
        running.kill()
        with RocksDBStore(tmp_path / "store") as store:
            (version,) = (v for v in saved if torch.equal(versions(store), versions_after(v)))
            found.add(version)
        assert {p.name for p in (tmp_path / "store").iterdir()} <= {"lock", "rows", "snapshots"}
    for version in saved:
        with RocksDBStore.open_checkpoint(tmp_path / f"saved-{version}") as store:
            assert torch.equal(versions(store), versions_after(version))


@pytest.mark.parametrize("reached", ["rows.restored", "rows.replaced", "both"])
def test_a_replacement_that_was_cut_short_is_undone(folder: Path, reached: str) -> None:
    """In each state that a process can leave between two of its steps."""
    rows = folder / "store" / "rows"
    if reached != "rows.restored":
        rows.rename(folder / "store" / "rows.replaced")
    if reached != "rows.replaced":
        shutil.copytree(folder / "saved" / "rows", folder / "store" / "rows.restored")
    with RocksDBStore(folder / "store") as store:
        assert torch.equal(versions(store), versions_after(LATER))
    assert {p.name for p in (folder / "store").iterdir()} == {"lock", "rows"}
