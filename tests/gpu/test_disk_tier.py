"""Tables on disk on a GPU: captured steps train what tables on the GPU train."""

import contextlib
import threading
from pathlib import Path

import pytest
import torch

from tests.support.disk_tables import (
    LOSS,
    StoredRanker,
    assert_same_tables,
    batches,
    disk_groups_of,
    most_rows,
    optimizers_of,
)
from tests.support.tiny_training import results_of
from torchembed import Disk, Dynamic
from torchembed.training import CheckpointFolder, TrainingRun, TrainPipeline

pytestmark = pytest.mark.gpu

NUM_BATCHES = 40


def disk(path: Path, num_cached: int) -> Disk:
    """A cache of the rows of so many batches, and host memory for two more."""
    most = -(-most_rows(batches("fixed", NUM_BATCHES)) // 2)
    cached = num_cached * most
    return Disk(path=path, cache_rows=cached, host_rows=cached + 2 * most)


@pytest.mark.parametrize("dynamic", [None, Dynamic()], ids=["static", "dynamic"])
@pytest.mark.parametrize("num_cached", [1, 2], ids=["one batch", "two batches"])
def test_captured_steps_equal_those_with_all_rows_on_the_gpu(
    device: torch.device, tmp_path: Path, num_cached: int, dynamic: Dynamic | None
) -> None:
    of_form = batches("fixed", NUM_BATCHES)
    expected = StoredRanker(None, dynamic=dynamic).to(device)
    pipeline = TrainPipeline(expected, LOSS, optimizers_of(expected), device=device)
    losses = results_of(pipeline, of_form)
    model = StoredRanker(disk(tmp_path, num_cached), dynamic=dynamic).to(device)
    with TrainPipeline(model, LOSS, optimizers_of(model)) as pipeline:
        assert pipeline.device.type == "cuda"
        assert results_of(pipeline, of_form) == losses
        num_graphs = sum(n for kind, n in pipeline.kinds.items() if kind.form == "graph")
    assert num_graphs >= NUM_BATCHES - 8
    assert_same_tables(model, expected)
    assert all(not group.lines.store.is_empty for group in disk_groups_of(model))
    for one in (batch.to(device) for batch in batches("fixed", 7, first=60)):
        wanted, found = (m.eval()(one.dense, one.sparse) for m in (expected, model))
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dynamic", [None, Dynamic()], ids=["static", "dynamic"])
@pytest.mark.parametrize("wait", [True, False])
def test_captured_steps_go_on_from_a_checkpoint(
    device: torch.device, tmp_path: Path, dynamic: Dynamic | None, wait: bool
) -> None:
    """The saved run goes on meanwhile, and the resumed one has captured steps of its own before."""
    of_form, runs, found = batches("fixed", NUM_BATCHES), [], []
    for name in ("kept", "resumed"):
        model = StoredRanker(disk(tmp_path / name, 1), dynamic=dynamic).to(device)
        runs.append(TrainingRun(model=model, optimizers=optimizers_of(model)))
    pipelines = [TrainPipeline(r.model, LOSS, r.optimizers, device=device) for r in runs]
    results_of(pipelines[0], of_form[:20])
    results_of(pipelines[1], of_form[5:25])
    with contextlib.closing(CheckpointFolder(tmp_path / "run")) as checkpoints:
        checkpoints.save(20, runs[0], wait=wait)
        found.append(results_of(pipelines[0], of_form[20:]))
    assert CheckpointFolder(tmp_path / "run").load(runs[1]) == 20
    found.append(results_of(pipelines[1], of_form[20:]))
    assert found[0] == found[1]
    assert_same_tables(*(run.model for run in runs))


def test_a_batch_that_is_too_large_for_host_memory_is_named(
    device: torch.device, tmp_path: Path
) -> None:
    of_form = batches("fixed", NUM_BATCHES)
    most = -(-most_rows(of_form) // 2)
    model = StoredRanker(Disk(path=tmp_path, cache_rows=most, host_rows=most + 1)).to(device)
    pipeline = TrainPipeline(model, LOSS, optimizers_of(model), device=device)
    with pytest.raises(RuntimeError, match=r"tables a, b on disk share \d+ rows of host memory"):
        results_of(pipeline, of_form)


def test_a_pipeline_that_is_closed_leaves_no_thread(device: torch.device, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    of_form = batches("fixed", NUM_BATCHES)
    model = StoredRanker(disk(tmp_path, 1)).to(device)
    with TrainPipeline(model, LOSS, optimizers_of(model), device=device) as pipeline:
        results_of(pipeline, of_form)
    assert set(threading.enumerate()) <= before
