"""The lines of a run, also of one that broke off and goes on."""

import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.tiny_model import TinyModel, make_batches, make_optimizers
from torchembed.training import (
    History,
    LearningRate,
    MetricsWriter,
    TrainPipeline,
    read_metrics,
    train,
)

HAS_TENSORBOARD = importlib.util.find_spec("tensorboard") is not None


def test_numbers_of_numpy_and_tensors_are_written(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(
            1, loss=np.float32(0.25), auc=torch.tensor(0.5), count=np.int64(3), lr=math.inf
        )  # type: ignore[arg-type]
    (line,) = read_metrics(tmp_path)
    assert {name: line[name] for name in ("loss", "auc", "count", "lr")} == {
        "loss": 0.25,
        "auc": 0.5,
        "count": 3,
        "lr": None,
    }


def test_train_writes_what_it_reads(tmp_path: Path) -> None:
    model = TinyModel()
    optimizers = make_optimizers(model, lr=0.5)
    schedulers = [LearningRate(warmup_steps=4).scheduler(optimizer) for optimizer in optimizers]
    with MetricsWriter(str(tmp_path)) as metrics:
        history = train(
            TrainPipeline(model, F.binary_cross_entropy_with_logits, optimizers),
            make_batches([8] * 5),
            schedulers=schedulers,
            history=History(read_loss_every=2),
            metrics=metrics,
        )
        lines = read_metrics(tmp_path)
        metrics.write(5, validation_auc=math.nan, validation_logloss=0.25)
    assert [(line["step"], line["loss"]) for line in lines] == history.losses
    assert [line["lr"] for line in lines] == [0.25, 0.5, 0.5]
    assert all(line["samples_per_second"] > 0 for line in lines)
    seconds = [8 * n / line["samples_per_second"] for n, line in zip((2, 2, 1), lines, strict=True)]
    assert 0 < sum(seconds) <= history.seconds
    times = [line["time"] for line in read_metrics(tmp_path)]
    assert times == sorted(times)
    last = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last) | {"time": 0} == {
        "step": 5,
        "time": 0,
        "validation_auc": None,
        "validation_logloss": 0.25,
    }


def test_what_came_after_the_checkpoint_is_written_again(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        for step in (2, 4, 4, 6):
            metrics.write(step, loss=step / 8)
    before = read_metrics(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "ti')
    with MetricsWriter(tmp_path, after_step=4) as metrics:
        assert read_metrics(tmp_path) == before[:3]
        metrics.write(6, loss=9.0)
    assert [line["loss"] for line in read_metrics(tmp_path)] == [0.25, 0.5, 0.5, 9.0]
    with MetricsWriter(tmp_path):
        assert read_metrics(tmp_path) == []


@pytest.mark.skipif(HAS_TENSORBOARD, reason="tensorboard is installed")
def test_tensorboard_is_named_where_it_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"needs the package tensorboard.*pip install tensorbo"):
        MetricsWriter(tmp_path, tensorboard=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not HAS_TENSORBOARD, reason="tensorboard is not installed")
def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(tmp_path, tensorboard=True) as metrics:
        for step in (1, 2, 3):
            metrics.write(step, loss=step / 4)
    with MetricsWriter(tmp_path, tensorboard=True, after_step=2) as metrics:
        metrics.write(3, loss=8.0)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 0.25), (2, 0.5), (3, 8.0)]
