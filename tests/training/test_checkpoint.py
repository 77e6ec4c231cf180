"""What is saved comes back, and training goes on as if it had not stopped."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.training.models import TinyModel, make_batches, make_optimizers
from torchembed.training import evaluate, load_checkpoint, save_checkpoint, train

LOSS = F.binary_cross_entropy_with_logits


def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    kept = TinyModel(is_deep=True)
    of_kept = make_optimizers(kept)
    train(kept, LOSS, of_kept, make_batches([8] * 4))
    save_checkpoint(tmp_path / "checkpoint", kept, of_kept)

    loaded = TinyModel(is_deep=True)
    of_loaded = make_optimizers(loaded, lr=0.5)
    load_checkpoint(tmp_path / "checkpoint", loaded, of_loaded)
    assert [o.param_groups[0]["lr"] for o in of_loaded] == [0.125, 0.125]
    for model, optimizers in ((kept, of_kept), (loaded, of_loaded)):
        train(model, LOSS, optimizers, make_batches([8] * 3, seed=1))
    for name, value in kept.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_a_model_on_the_device_trains_and_comes_back(device: torch.device, tmp_path: Path) -> None:
    models = [TinyModel(is_deep=True).to(device) for _ in range(2)]
    optimizers = [make_optimizers(model) for model in models]
    train(models[0], LOSS, optimizers[0], make_batches([8, 8, 3]))
    save_checkpoint(tmp_path / "checkpoint", models[0], optimizers[0])
    load_checkpoint(tmp_path / "checkpoint", models[1], optimizers[1])
    assert all(parameter.device.type == device.type for parameter in models[1].parameters())
    first, second = (evaluate(model, make_batches([8, 5], seed=1)) for model in models)
    assert first == second


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.Adagrad])
def test_state_of_an_ordinary_optimizer_over_tables(optimizer: type, tmp_path: Path) -> None:
    models = [TinyModel(), TinyModel()]
    optimizers = [[optimizer(model.parameters(), lr=0.1)] for model in models]
    train(models[0], LOSS, optimizers[0], make_batches([8] * 2))
    save_checkpoint(tmp_path, models[0], optimizers[0])
    load_checkpoint(tmp_path, models[1], optimizers[1])
    for model, its_optimizers in zip(models, optimizers, strict=True):
        train(model, LOSS, its_optimizers, make_batches([8] * 2, seed=1))
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_checkpoint_replaces_another_and_what_broke_off(tmp_path: Path) -> None:
    path, model = tmp_path / "checkpoint", TinyModel()
    save_checkpoint(path, TinyModel(is_deep=True))
    for left_over in ("checkpoint.partial", "checkpoint.replaced"):
        (tmp_path / left_over).mkdir()
        (tmp_path / left_over / "__9_0.distcp").touch()
    save_checkpoint(path, model)
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]
    assert sorted(entry.name for entry in path.iterdir()) == [".metadata", "__0_0.distcp"]
    load_checkpoint(path, model)


def test_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no checkpoint: there is no file .*data"):
        load_checkpoint(tmp_path, TinyModel())


def test_another_models_checkpoint_changes_nothing(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, TinyModel())
    deep = TinyModel(is_deep=True)
    before = {name: value.clone() for name, value in deep.state_dict().items()}
    with pytest.raises(ValueError, match=r"has no model\.dense\.0\.weight; was it saved from"):
        load_checkpoint(tmp_path, deep)
    wide = TinyModel()
    wide.dense = torch.nn.Linear(3, 1)
    with pytest.raises(ValueError, match=r"weight must have shape \[1, 3\] .*, got \[1, 2\]"):
        load_checkpoint(tmp_path, wide)
    for name, value in deep.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_an_optimizer_of_something_else_is_named(tmp_path: Path) -> None:
    stranger = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(ValueError, match=r"parameters of the model alone, got one of shape \[3\]"):
        save_checkpoint(tmp_path, TinyModel(), [stranger])
