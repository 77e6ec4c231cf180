"""Faults of the disk below tables: training stops and names them, or reads no stale row."""

import gc
import logging
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support import disk_processes, store_processes
from tests.support.disk_processes import SIZES
from tests.support.disk_tables import (
    LOSS,
    StoredRanker,
    assert_same_tables,
    batches,
    disk_groups_of,
    optimizers_of,
    train_by_hand,
)
from tests.support.tiny_model import step_by_hand
from tests.support.tiny_training import results_of
from tests.support.waiting import wait_until
from torchembed import Disk
from torchembed.optim import SGD, Adam, split_parameters
from torchembed.stores import CorruptStoreError, StoreInUseError
from torchembed.tables.tiers.line_store import LineStore
from torchembed.training import TrainPipeline

CPU = torch.device("cpu")
BATCHES = batches("mixed", 20)


def pipeline_of(model: StoredRanker) -> TrainPipeline:
    return TrainPipeline(model, LOSS, optimizers_of(model), device=CPU, capture=True)


def test_two_processes_cannot_use_one_path_and_what_a_killed_one_left_is_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    running = store_processes.start(disk_processes.train_until_killed, tmp_path)
    assert running.next_message()
    model = StoredRanker(Disk(path=tmp_path, **SIZES))
    message = rf"one store at a time may have .*rank_0_of_1 open, and process {running.process.pid}"
    with pytest.raises(StoreInUseError, match=message):
        optimizers_of(model)
    running.kill()
    own = tmp_path / "rank_0_of_1"
    left = {entry for entry in own.iterdir() if entry.is_dir()}
    assert left
    (own / "notes").mkdir()  # somebody else's
    expected = StoredRanker(None)
    losses = train_by_hand(expected, BATCHES)
    model = StoredRanker(Disk(path=tmp_path, **SIZES))
    with caplog.at_level(logging.INFO, logger="torchembed"):
        assert train_by_hand(model, BATCHES) == losses
    assert "removed rows of tables in" in caplog.text
    assert_same_tables(model, expected)
    assert (own / "notes").exists()


def test_models_of_one_process_share_a_path(tmp_path: Path) -> None:
    models = [StoredRanker(Disk(path=tmp_path, **SIZES)) for _ in range(2)]
    expected = StoredRanker(None)
    losses = train_by_hand(expected, BATCHES)
    assert [train_by_hand(model, BATCHES) for model in models] == [losses, losses]
    folders = {entry.name for entry in (tmp_path / "rank_0_of_1").iterdir() if entry.is_dir()}
    assert len(folders) == 4
    for model in models:
        assert_same_tables(model, expected)


def test_folders_go_with_the_model(tmp_path: Path) -> None:
    model = StoredRanker(Disk(path=tmp_path, **SIZES))
    train_by_hand(model, BATCHES)
    del model
    gc.collect()
    # The thread that moves rows may have them a moment longer.
    own = tmp_path / "rank_0_of_1"
    wait_until(lambda: [entry.name for entry in own.iterdir()] == ["lock"])


def test_threads_end_with_the_model(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    model = StoredRanker(Disk(path=tmp_path, **SIZES))
    train_by_hand(model, BATCHES)
    assert not set(threading.enumerate()) <= before
    del model
    gc.collect()
    wait_until(lambda: set(threading.enumerate()) <= before, lambda: "a thread is left")


def test_a_full_disk_stops_training_and_goes_on_saying_so(tmp_path: Path) -> None:
    told = store_processes.result_of(disk_processes.train_up_to_a_limit, tmp_path, 4096)
    assert len(told) >= 2
    assert all("File too large: raise the limit on the size of files" in one for one in told)


def test_a_disk_that_vanishes_stops_training(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    model = StoredRanker(Disk(path=path, **SIZES))
    pipeline, of = pipeline_of(model), iter(BATCHES)
    pipeline.progress(of)
    shutil.rmtree(path)
    with pytest.raises(FileNotFoundError, match="rows") as first:
        results_of(pipeline, list(of))
    with pytest.raises(FileNotFoundError) as second:
        pipeline.progress(iter(BATCHES))
    assert second.value is first.value


@pytest.mark.parametrize("way", ["by hand", "pipeline", "evaluation"])
def test_a_corrupt_database_is_never_read(tmp_path: Path, way: str) -> None:
    model = StoredRanker(Disk(path=tmp_path, **SIZES))
    optimizers = optimizers_of(model)
    pipeline = TrainPipeline(model, LOSS, optimizers, device=CPU, capture=True)
    results_of(pipeline, BATCHES)
    for number, group in enumerate(disk_groups_of(model)):
        group.write_back()
        opened = group.lines.store._open
        assert opened is not None
        opened.store.checkpoint(tmp_path / f"copy {number}")  # writes lines to files
        for file in opened.folder.rglob("*.sst"):
            content = bytearray(file.read_bytes())
            middle = slice(0, len(content) // 2)
            content[middle] = bytes(byte ^ 0x10 for byte in content[middle])
            file.write_bytes(content)
    more = batches("mixed", 20, first=3)

    def go_on() -> None:
        if way == "pipeline":
            results_of(pipeline, more)
        for one in more:
            if way == "by hand":
                step_by_hand(model, LOSS, optimizers, one)
            else:
                model.eval()(one.dense, one.sparse)

    with pytest.raises(CorruptStoreError, match="is not as it was written; restore it from a "):
        go_on()


def test_a_slow_disk_slows_steps_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = StoredRanker(None)
    losses = train_by_hand(expected, BATCHES)
    read, write = LineStore.read, LineStore.write

    def slow_read(store: LineStore, rows: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(0.02)
        return read(store, rows)

    def slow_write(store: LineStore, rows: Tensor, lines: Tensor) -> None:
        time.sleep(0.02)
        write(store, rows, lines)

    monkeypatch.setattr(LineStore, "read", slow_read)
    monkeypatch.setattr(LineStore, "write", slow_write)
    model = StoredRanker(Disk(path=tmp_path, **SIZES))
    with pipeline_of(model) as pipeline:
        assert results_of(pipeline, BATCHES) == losses
    assert_same_tables(model, expected)


def test_paths_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, error, message in (
        (tmp_path / "no" / "rows", FileNotFoundError, "path of Disk must be in a folder that exi"),
        (tmp_path / "file", NotADirectoryError, "path of Disk must be a folder, and is a file"),
        (
            tmp_path / ("n" * 300),
            OSError,
            (
                "path of Disk must be a folder that can be made, and the system says 'File name "
                f"too long'; give another: '{tmp_path}/nnn"
            ),
        ),
        (
            Path("/proc/rows"),
            FileNotFoundError,
            (
                "path of Disk must be a folder that can be made, and the system says 'No such file "
                "or directory'; give another: '/proc/rows'"
            ),
        ),
    ):
        with pytest.raises(error, match=message):
            optimizers_of(StoredRanker(Disk(path=path, **SIZES)))


@pytest.fixture
def no_rocksdict() -> Iterator[None]:
    kept = sys.modules.get("rocksdict")
    sys.modules["rocksdict"] = None  # type: ignore[assignment]
    yield
    del sys.modules["rocksdict"]
    if kept is not None:
        sys.modules["rocksdict"] = kept


@pytest.mark.usefixtures("no_rocksdict")
def test_what_to_install_is_said_before_training(tmp_path: Path) -> None:
    model = StoredRanker(Disk(path=tmp_path / "rows", **SIZES))
    with pytest.raises(ImportError, match=r"rocksdict, .*; pip install 'torchembed\[disk\]'"):
        optimizers_of(model)
    assert not (tmp_path / "rows").exists()


def test_an_optimizer_that_is_refused_leaves_tables_as_they_were(tmp_path: Path) -> None:
    # With Adam's state a row takes 48 bytes in place of 16.
    model = StoredRanker(Disk(path=tmp_path, cache_rows=20, host_bytes=30 * 16))
    tables, _ = split_parameters(model.parameters())
    with pytest.raises(ValueError, match="enlarge host_rows or host_bytes"):
        Adam(tables, lr=0.1)
    expected, one = StoredRanker(None), BATCHES[0]
    assert torch.equal(model.eval()(one.dense, one.sparse), expected(one.dense, one.sparse))
    SGD(tables, lr=0.1)
