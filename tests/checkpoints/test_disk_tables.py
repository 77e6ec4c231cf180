"""Checkpoints of runs with tables on disk."""

import os
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.support import disk_runs
from tests.support.disk_runs import new_run, rows_of, storage_of, trained
from tests.support.store_processes import result_of
from tests.support.tiny_model import KEYS, TinyModel, fixed_batches, make_optimizers
from torchembed import Dynamic, EmbeddingBag, EmbeddingBagConfig
from torchembed.checkpoints import model_rows
from torchembed.optim import Adagrad
from torchembed.stores import CorruptStoreError
from torchembed.training import CheckpointFolder, TrainingRun

NUM_BATCHES, NUM_SAVED = 12, 7
CASES = [
    ("disk", "disk", torch.bfloat16),
    ("disk", "small disk", torch.float32),
    ("small disk", "host", torch.float32),
    ("disk", "device", torch.bfloat16),
    ("device", "disk", torch.float32),
    ("host", "small disk", torch.bfloat16),
]


def assert_equal_runs(one: TrainingRun, other: TrainingRun) -> None:
    found, wanted = rows_of(one), rows_of(other)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name
    for a, b in zip(one.model.dense.parameters(), other.model.dense.parameters(), strict=True):
        assert torch.equal(a, b)
    states = (tree_leaves(run.optimizers[1].state_dict()["state"]) for run in (one, other))
    for a, b in zip(*states, strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    steps = [
        {table.group.step.item() for table in run.model.tables.table_set.tables}
        for run in (one, other)
    ]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("dynamic", [None, Dynamic()], ids=["static", "dynamic"])
@pytest.mark.parametrize(("saved", "loaded", "dtype"), CASES)
def test_training_goes_on_as_if_it_had_not_stopped(
    saved: str, loaded: str, dynamic: Dynamic | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    """With the rows where the new run has them."""
    batches = fixed_batches(NUM_BATCHES)
    kept = trained(new_run(saved, tmp_path / "kept", dynamic, dtype), batches[:NUM_SAVED])
    CheckpointFolder(tmp_path / "run").save(NUM_SAVED, kept)
    resumed = new_run(loaded, tmp_path / "resumed", dynamic, dtype)
    assert CheckpointFolder(tmp_path / "run").load(resumed) == NUM_SAVED
    assert_equal_runs(resumed, kept)
    for run in (kept, resumed):
        trained(run, batches[NUM_SAVED:])
    assert_equal_runs(resumed, kept)


def files_of(folder: Path) -> dict[str, int]:
    """The files of lines below a folder, and their numbers on the file system."""
    return {path.name: path.stat().st_ino for path in folder.rglob("*.sst")}


@pytest.mark.parametrize("wait", [True, False])
def test_checkpoints_stay_as_they_are_while_training_goes_on(wait: bool, tmp_path: Path) -> None:
    """And share files of lines with the database, until these are merged."""
    batches = fixed_batches(NUM_BATCHES)
    run = new_run("disk", tmp_path / "disk", None)
    checkpoints = CheckpointFolder(tmp_path / "run", keep=9)
    saved = {}
    for step in range(0, NUM_BATCHES, 3):
        trained(run, batches[step : step + 3])
        checkpoints.save(step + 3, run, wait=wait)
        trained(run, [])
        saved[step + 3] = rows_of(run)
    checkpoints.close()
    assert checkpoints.steps() == list(saved)
    assert set(files_of(tmp_path / "run").values()) & set(files_of(tmp_path / "disk").values())
    loaded = new_run("disk", tmp_path / "loaded", None)
    for step in reversed(saved):
        assert CheckpointFolder(tmp_path / "run").load(loaded, step) == step
        found = rows_of(loaded)
        assert all(torch.equal(found[name], saved[step][name]) for name in found)
        shared = set(files_of(tmp_path / "run").values())
        assert shared & set(files_of(tmp_path / "loaded").values())
    # Nothing but the two live databases is left under their paths.
    for place in ("disk", "loaded"):
        (of_rank,) = (tmp_path / place).iterdir()
        assert len([path for path in of_rank.iterdir() if path.is_dir()]) == 1
    CheckpointFolder(tmp_path / "run", keep=1).save(NUM_BATCHES + 1, run)
    assert CheckpointFolder(tmp_path / "run").steps() == [NUM_BATCHES + 1]


@pytest.mark.parametrize("url", ["memory://disk-tables", "/dev/shm"])
def test_checkpoints_on_other_storages_hold_copies(url: str, tmp_path: Path) -> None:
    if url.startswith("/"):
        if not os.access(url, os.W_OK):
            pytest.skip(f"needs {url}")
        url = tempfile.mkdtemp(dir=url)
    batches = fixed_batches(NUM_SAVED)
    run = trained(new_run("disk", tmp_path / "disk", Dynamic()), batches)
    checkpoints = CheckpointFolder(url)
    try:
        checkpoints.save(NUM_SAVED, run)
        for place in ("disk", "device"):
            loaded = new_run(place, tmp_path / "loaded", Dynamic())
            assert CheckpointFolder(url).load(loaded) == NUM_SAVED
            assert_equal_runs(loaded, run)
    finally:
        checkpoints.close()
        if url.startswith("/"):
            shutil.rmtree(url)


def database_of(folder: Path) -> Path:
    (database,) = folder.glob("step-*/__0_database_0")
    return database


@pytest.mark.parametrize("place", ["disk", "device"])
@pytest.mark.parametrize(
    ("pattern", "damage", "error", "message"),
    [
        ("*.sst", "removed", FileNotFoundError, r"lacks its file __0_database_0/rows/.*\.sst"),
        ("*.sst", "cut off", ValueError, r"sst must have \d+ bytes as it was written, got \d+; it"),
        ("MANIFEST-*", "cut off", ValueError, r"MANIFEST-.* must have \d+ bytes and CRC-32"),
        ("CURRENT", "flipped", ValueError, r"CURRENT must have \d+ bytes and CRC-32"),
        ("*.sst", "flipped", CorruptStoreError, r"the store in .*__0_database_0 is not as it was"),
    ],
)
def test_a_damaged_database_is_named_and_nothing_is_changed(
    place: str, pattern: str, damage: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    run = trained(new_run("disk", tmp_path / "disk", None), fixed_batches(4))
    CheckpointFolder(tmp_path / "run").save(4, run)
    file = max(database_of(tmp_path / "run").rglob(pattern), key=lambda p: p.stat().st_size)
    content = bytearray(file.read_bytes())
    file.unlink()
    if damage == "cut off":
        file.write_bytes(content[:-3])
    elif damage == "flipped":
        content[int(len(content) * 0.9999)] ^= 0x10
        file.write_bytes(content)
    other = trained(new_run(place, tmp_path / "other", None), fixed_batches(9)[7:])
    before = rows_of(other)
    with pytest.raises(error, match=message):
        CheckpointFolder(tmp_path / "run").load(other)
    after = rows_of(other)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_another_model_is_named_and_nothing_is_changed(tmp_path: Path) -> None:
    run = trained(new_run("disk", tmp_path / "disk", None), fixed_batches(4))
    CheckpointFolder(tmp_path / "run").save(4, run)
    for place in ("disk", "host"):
        other = new_run(place, tmp_path / "other", None, torch.bfloat16)
        before = rows_of(other)
        message = r"model.tables.embedding_bags.f0.weight has dtype torch.float32, and torch.bfl"
        with pytest.raises(ValueError, match=message):
            CheckpointFolder(tmp_path / "run").load(other)
        after = rows_of(other)
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_run_without_optimizers_takes_the_rows(tmp_path: Path) -> None:
    run = trained(new_run("disk", tmp_path / "disk", None), fixed_batches(4))
    CheckpointFolder(tmp_path / "run").save(4, run)
    wanted = rows_of(run)
    for place in ("disk", "device"):
        other = TrainingRun(model=new_run(place, tmp_path / "other", None).model)
        assert CheckpointFolder(tmp_path / "run").load(other) == 4
        for key in KEYS:
            name = f"tables.embedding_bags.{key}.weight"
            (chunk,) = model_rows(other.model, name)
            assert torch.equal(chunk.rows, wanted[f"{name}.rows"])


@pytest.mark.parametrize("saved", ["disk", "device"])
@pytest.mark.parametrize("loaded", ["disk", "device"])
@pytest.mark.parametrize("capacities", [(40, 64), (64, 40), (None, 64)])
def test_dynamic_tables_of_other_capacities_are_loaded_by_id(
    saved: str, loaded: str, capacities: tuple[int | None, int], tmp_path: Path
) -> None:
    """Static ones into dynamic ones, too."""

    def run_of(place: str, capacity: int | None, folder: str) -> TrainingRun:
        def config(*, num_embeddings: int, **others: Any) -> EmbeddingBagConfig:
            return EmbeddingBagConfig(
                num_embeddings=capacity or num_embeddings,
                dynamic=None if capacity is None else Dynamic(),
                storage=storage_of(place, tmp_path / folder),
                **others,
            )

        model = TinyModel(is_deep=True, config=config)
        return TrainingRun(model=model, optimizers=make_optimizers(model))

    run = trained(run_of(saved, capacities[0], "saved"), fixed_batches(5))
    CheckpointFolder(tmp_path / "run").save(5, run)
    other = trained(run_of(loaded, capacities[1], "loaded"), fixed_batches(8)[5:])
    assert CheckpointFolder(tmp_path / "run").load(other) == 5
    found, wanted = rows_of(other), rows_of(run)
    for name, tensor in found.items():
        if name in wanted and not (capacities[0] is None and name.endswith("touched")):
            assert torch.equal(tensor, wanted[name]), name


def test_modules_of_one_table_go_on_with_the_saved_seed(tmp_path: Path) -> None:
    """Rows that were never written follow from it; another run draws another one."""

    def run_of(folder: str) -> TrainingRun:
        bag = EmbeddingBag(1000, 8, mode="sum", storage=storage_of("disk", tmp_path / folder))
        return TrainingRun(model=bag, optimizers=[Adagrad(bag.parameters(), lr=0.1)])

    def rows(run: TrainingRun) -> Tensor:
        (chunk,) = model_rows(run.model, "weight")
        return chunk.rows.clone()

    run, other = run_of("a"), run_of("b")
    run.model(torch.arange(60).view(6, 10)).square().sum().backward()
    run.optimizers[0].step()
    assert not torch.equal(rows(run), rows(other))
    CheckpointFolder(tmp_path / "run").save(1, run)
    assert CheckpointFolder(tmp_path / "run").load(other) == 1
    assert torch.equal(rows(run), rows(other))
    num_lines = other.model.table_set.current_groups()[0].lines.store.table.num_rows()
    assert num_lines == 60


def test_a_run_that_never_trained_is_saved_and_loaded(tmp_path: Path) -> None:
    run, other = (new_run("disk", tmp_path / name, None) for name in ("a", "b"))
    CheckpointFolder(tmp_path / "run").save(0, run)
    assert not list((tmp_path / "run").rglob("*.sst"))
    trained(other, fixed_batches(3))
    assert CheckpointFolder(tmp_path / "run").load(other) == 0
    assert_equal_runs(other, run)


class FailingState:
    """Has a state that cannot be pickled."""

    def state_dict(self) -> dict[str, Any]:
        return {"state": lambda: None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


def test_a_save_that_fails_leaves_nothing_beside_the_database(tmp_path: Path) -> None:
    run = trained(new_run("disk", tmp_path / "disk", None), fixed_batches(4))
    checkpoints = CheckpointFolder(tmp_path / "run")
    checkpoints.save(4, run)
    failing = TrainingRun(
        model=run.model, optimizers=run.optimizers, others={"failing": FailingState()}
    )
    with pytest.raises((AttributeError, pickle.PicklingError)):
        checkpoints.save(5, failing)
    (of_rank,) = (tmp_path / "disk").iterdir()
    assert len([path for path in of_rank.iterdir() if path.is_dir()]) == 1
    assert checkpoints.steps() == [4]


@pytest.mark.parametrize("limit_bytes", [200, 3000])
def test_a_save_that_the_disk_has_no_room_for_leaves_the_last_one_whole(
    limit_bytes: int, tmp_path: Path
) -> None:
    told, *rest = result_of(disk_runs.save_up_to_a_limit, tmp_path, limit_bytes)
    assert "File too large" in told
    assert rest == [[4], 4, True]


def test_a_save_of_a_database_that_is_gone_leaves_the_last_one_whole(tmp_path: Path) -> None:
    told, *rest = result_of(disk_runs.save_from_a_folder_that_is_gone, tmp_path)
    assert told.startswith(("CorruptStoreError the store in", "FileNotFoundError"))
    assert str(tmp_path / "disk") in told
    assert rest == [[4], 4, True]


@pytest.mark.parametrize("wait", [True, False])
def test_a_save_between_two_steps_of_a_pipeline(wait: bool, tmp_path: Path) -> None:
    """Which has prepared batches ahead, and goes on while the checkpoint is written."""
    batches = fixed_batches(NUM_BATCHES)
    run = new_run("small disk", tmp_path / "disk", None)
    pipeline, iterator = disk_runs.PIPELINE(run.model, optimizers=run.optimizers), iter(batches)
    checkpoints = CheckpointFolder(tmp_path / "run", keep=NUM_BATCHES)
    for step in range(1, NUM_BATCHES + 1):
        pipeline.progress(iterator)
        if step in (3, 8):
            checkpoints.save(step, run, wait=wait)
    checkpoints.close()
    for step in (3, 8):
        resumed = new_run("disk", tmp_path / "resumed", None)
        assert CheckpointFolder(tmp_path / "run").load(resumed, step) == step
        assert_equal_runs(trained(resumed, batches[step:]), run)
