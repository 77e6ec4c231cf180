"""What is saved comes back, and training goes on as if it had not stopped."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.training.models import TinyModel, make_batches, make_optimizers
from torchembed.training import CheckpointFolder, TrainingRun, evaluate, train

LOSS = F.binary_cross_entropy_with_logits


def new_run(*, is_deep: bool = False, lr: float = 0.125) -> TrainingRun:
    model = TinyModel(is_deep=is_deep)
    return TrainingRun(model=model, optimizers=make_optimizers(model, lr=lr))


def train_run(run: TrainingRun, num_batches: int, seed: int = 0) -> None:
    train(run.model, LOSS, run.optimizers, make_batches([8] * num_batches, seed=seed))


def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    kept, loaded = new_run(is_deep=True), new_run(is_deep=True, lr=0.5)
    train_run(kept, 4)
    CheckpointFolder(tmp_path).save(4, kept)
    assert CheckpointFolder(tmp_path).load(loaded) == 4
    assert [o.param_groups[0]["lr"] for o in loaded.optimizers] == [0.125, 0.125]
    for run in (kept, loaded):
        train_run(run, 3, seed=1)
    for name, value in kept.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], value), name


def test_a_model_on_the_device_trains_and_comes_back(device: torch.device, tmp_path: Path) -> None:
    runs = []
    for _ in range(2):
        model = TinyModel(is_deep=True).to(device)
        runs.append(TrainingRun(model=model, optimizers=make_optimizers(model)))
    train_run(runs[0], 3)
    CheckpointFolder(tmp_path).save(3, runs[0])
    CheckpointFolder(tmp_path).load(runs[1])
    model = runs[1].model
    assert all(parameter.device.type == device.type for parameter in model.parameters())
    first, second = (evaluate(run.model, make_batches([8, 5], seed=1)) for run in runs)
    assert first == second


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.Adagrad])
def test_state_of_an_ordinary_optimizer_over_tables(optimizer: type, tmp_path: Path) -> None:
    models = [TinyModel(), TinyModel()]
    runs = [
        TrainingRun(model=model, optimizers=[optimizer(model.parameters(), lr=0.1)])
        for model in models
    ]
    train_run(runs[0], 2)
    CheckpointFolder(tmp_path).save(2, runs[0])
    CheckpointFolder(tmp_path).load(runs[1])
    for run in runs:
        train_run(run, 2, seed=1)
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)
