"""What is saved comes back, and training goes on as if it had not stopped."""

import dataclasses
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.checkpoint import FileSystemReader

import torchembed
from tests.support.tiny_model import TinyModel, make_batches, make_optimizers
from torchembed.checkpoints.files import save_planner
from torchembed.optim import DenseAdam
from torchembed.training import CheckpointFolder, TrainingRun, TrainPipeline, evaluate, train

LOSS = F.binary_cross_entropy_with_logits


def new_run(*, is_deep: bool = False, lr: float = 0.125) -> TrainingRun:
    model = TinyModel(is_deep=is_deep)
    return TrainingRun(model=model, optimizers=make_optimizers(model, lr=lr))


def train_run(run: TrainingRun, num_batches: int, seed: int = 0) -> None:
    train(
        TrainPipeline(run.model, LOSS, run.optimizers), make_batches([8] * num_batches, seed=seed)
    )


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


def test_a_schedule_of_tables_and_dense_parameters_goes_on(tmp_path: Path) -> None:
    def run_of(first: int, last: int) -> tuple[TrainingRun, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = TinyModel(is_deep=True)
        optimizer = torchembed.optim.Adam.with_dense(model.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        run = TrainingRun(model=model, optimizers=[optimizer], others={"schedule": schedule})
        if first:
            assert CheckpointFolder(tmp_path).load(run) == first
        batches = list(make_batches([8] * last))[first:]
        train(TrainPipeline(model, LOSS, optimizer), batches, schedulers=[schedule])
        return run, optimizer

    whole, _ = run_of(0, 4)
    half, _ = run_of(0, 2)
    CheckpointFolder(tmp_path).save(2, half)
    resumed, optimizer = run_of(2, 4)
    rates = [part.param_groups[0]["lr"] for part in resumed.optimizers]
    assert rates == [group["lr"] for group in optimizer.param_groups] == [0.5**5] * 2
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


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


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_masters_of_flat_parameters(dtype: torch.dtype | None, tmp_path: Path) -> None:
    runs = []
    for _ in range(2):
        model = TinyModel(is_deep=True)
        tables, _ = make_optimizers(model)
        if dtype is not None:
            model.dense.register_forward_pre_hook(lambda _, inputs: (inputs[0].to(dtype),))
        dense = DenseAdam(model.dense.parameters(), lr=0.125, dtype=dtype)
        model.dense[1].to(dtype)
        runs.append(TrainingRun(model=model, optimizers=[tables, dense]))
    train_run(runs[0], 3)
    CheckpointFolder(tmp_path).save(3, runs[0])
    CheckpointFolder(tmp_path).load(runs[1])
    for run in runs:
        train_run(run, 2, seed=1)
    for ours, theirs in zip(*(run.model.parameters() for run in runs), strict=True):
        assert torch.equal(ours, theirs)


def parameters_of(run: TrainingRun) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.model.state_dict().items()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


class Counter:
    """Something with a state."""

    def __init__(self, value: int = 0) -> None:
        self.value = torch.tensor(value)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_random_generators_and_others_go_on(tmp_path: Path) -> None:
    counter = Counter(3)
    run = dataclasses.replace(new_run(), others={"counter": counter})
    CheckpointFolder(tmp_path).save(0, run)
    drawn = draw()
    counter.value += 1
    assert CheckpointFolder(tmp_path).load(run) == 0
    assert counter.value == 3
    assert draw() == drawn

    after = torch.get_rng_state()
    CheckpointFolder(tmp_path).load(TrainingRun(model=run.model))
    assert torch.equal(torch.get_rng_state(), after), "a model alone does not go on training"


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), np.random.rand()  # noqa: NPY002


def test_an_asynchronous_save_is_of_the_state_when_it_was_asked_for(tmp_path: Path) -> None:
    run, loaded = new_run(), new_run()
    lr = torch.tensor(0.25)
    run.optimizers[0].param_groups[0]["lr"] = lr
    train_run(run, 2)
    then, folder = parameters_of(run), CheckpointFolder(tmp_path)
    folder.save(2, run, wait=False)
    lr.fill_(0.5)
    train_run(run, 2, seed=1)
    folder.wait()
    folder.wait()
    assert folder.load(loaded) == 2
    assert_same(parameters_of(loaded), then)
    assert loaded.optimizers[0].param_groups[0]["lr"] == 0.25


def test_extra_state_comes_back(tmp_path: Path) -> None:
    class Calibrated(torch.nn.Module):
        scale = 1.0

        def get_extra_state(self) -> Any:
            return {"scale": self.scale}

        def set_extra_state(self, state: Any) -> None:
            self.scale = state["scale"]

    run, other = new_run(), new_run()
    run.model.calibrated, other.model.calibrated = Calibrated(), Calibrated()
    run.model.calibrated.scale = 3.0
    CheckpointFolder(tmp_path).save(1, run)
    CheckpointFolder(tmp_path).load(other)
    assert other.model.calibrated.scale == 3.0


def test_every_mismatch_is_named_and_nothing_is_changed(tmp_path: Path) -> None:
    saved = new_run()
    train_run(saved, 1)
    CheckpointFolder(tmp_path).save(1, saved)
    model = TinyModel(is_deep=True)
    model.tables = torchembed.EmbeddingBagCollection(
        [
            torchembed.EmbeddingBagConfig(
                name=key, num_embeddings=24, embedding_dim=4, feature_names=(key,), dtype=dtype
            )
            for key, dtype in (("f0", torch.float32), ("f1", torch.bfloat16))
        ]
    )
    run = TrainingRun(model=model, optimizers=make_optimizers(model))
    before = parameters_of(run)
    with pytest.raises(ValueError, match="of another model or run") as error:
        CheckpointFolder(tmp_path).load(run)
    for part in (
        r"model\.tables\.embedding_bags\.f0\.weight has shape \[23, 4\], and \[24, 4\] in the run",
        r"f1\.weight has dtype torch\.float32, and torch\.bfloat16 in the run",
        r"model\.dense\.0\.weight was not saved",
        r"model\.dense\.weight is not in the run",
        r"optimizers\.0\.state\.tables\.embedding_bags\.f0\.weight\.sum has shape \[23, 4\]",
        r"Nothing was loaded$",
    ):
        assert re.search(part, str(error.value)), (part, str(error.value))
    assert_same(parameters_of(run), before)


def test_other_optimizers_and_others_are_named(tmp_path: Path) -> None:
    model = TinyModel()
    adagrad = torch.optim.Adagrad(model.parameters())
    adam = torch.optim.Adam(
        [{"params": model.tables.parameters()}, {"params": model.dense.parameters()}]
    )
    CheckpointFolder(tmp_path).save(1, TrainingRun(model=model, optimizers=[adam]))
    for run, message in (
        (
            TrainingRun(model=model, optimizers=[adagrad], others={"loader": Counter()}),
            r"optimizers\.0 is Adam of torch, .*; others 'loader' was not saved",
        ),
        (
            TrainingRun(model=model, optimizers=[torch.optim.SGD(model.parameters())]),
            r"optimizers\.0 has 2 parameter groups, and 1 in the run; optimizers\.0 is Adam of",
        ),
        (TrainingRun(model=model, optimizers=[adam, adam]), r"optimizers\.1 was not saved"),
        (TrainingRun(model=model, others={"loader": Counter()}), r"others 'loader' was not saved"),
    ):
        with pytest.raises(ValueError, match=message):
            CheckpointFolder(tmp_path).load(run)


def test_optimizers_of_one_name_from_two_packages_are_told_apart(tmp_path: Path) -> None:
    model = TinyModel()
    fused = torchembed.optim.SGD(model.tables.parameters(), lr=0.25)
    CheckpointFolder(tmp_path).save(1, TrainingRun(model=model, optimizers=[fused]))
    plain = torch.optim.SGD(model.tables.parameters(), lr=0.5)
    with pytest.raises(
        ValueError, match=r"optimizers\.0 is SGD of torchembed, and the run's is SGD of torch\. Not"
    ):
        CheckpointFolder(tmp_path).load(TrainingRun(model=model, optimizers=[plain]))
    assert plain.param_groups[0]["lr"] == 0.5

    class SGD(torchembed.optim.SGD):
        """An optimizer of a script, whose package has another name when it is imported."""

    SGD.__module__ = "__main__"
    of_script = SGD(model.tables.parameters(), lr=0.5)
    CheckpointFolder(tmp_path).load(TrainingRun(model=model, optimizers=[of_script]))
    assert of_script.param_groups[0]["lr"] == 0.25


def test_others_are_loaded_without_a_model(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    assert folder.load_others({"counter": Counter()}) is None
    for step in (1, 2):
        folder.save(step, dataclasses.replace(new_run(), others={"counter": Counter(step)}))
    counter, before = Counter(), torch.get_rng_state()
    assert folder.load_others({"counter": counter}) == 2
    assert counter.value == 2
    assert folder.load_others({"counter": counter}, step=1) == 1
    assert counter.value == 1
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match=r"others 'loader' was not saved\. Nothing was loaded"):
        folder.load_others({"counter": counter, "loader": Counter()})
    assert counter.value == 1
    with pytest.raises(FileNotFoundError, match="3"):
        folder.load_others({"counter": counter}, step=3)


def test_fewer_optimizers_than_were_saved_are_named(tmp_path: Path) -> None:
    run = new_run()
    train_run(run, 1)
    CheckpointFolder(tmp_path).save(1, run)
    before = parameters_of(fresh := new_run())
    fewer = dataclasses.replace(fresh, optimizers=fresh.optimizers[:1])
    message = (
        r"optimizers\.1 was saved and is not in the run \(leave out all optimizers to load the"
    )
    with pytest.raises(ValueError, match=message):
        CheckpointFolder(tmp_path).load(fewer)
    assert_same(parameters_of(fresh), before)
    CheckpointFolder(tmp_path).load(TrainingRun(model=fresh.model))
    assert_same(parameters_of(fresh), parameters_of(run))


class OnlySaves:
    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"optimizers": torch.optim.SGD(torch.nn.Linear(1, 1).parameters())},
            r"optimizers must be a list of torch\.optim\.Optimizer, got a single SGD; pass \[optim",
        ),
        ({"optimizers": [3]}, r"optimizers\[0\] must be a torch\.optim\.Optimizer, got int"),
        ({"optimizers": iter(())}, r"optimizers must be a list of .*, got tuple_iterator"),
        ({"model": {}}, r"model must be a torch\.nn\.Module, got dict"),
        ({"others": [OnlySaves()]}, r"others must be a mapping from names to objects .*, got list"),
        (
            {"others": {"step": 3}},
            r"others\['step'\] must have state_dict\(\) and .*, got int, which has neither",
        ),
        ({"others": {"x": OnlySaves()}}, r"got OnlySaves, which has no load_state_dict\(\)"),
        ({"others": {3: Counter()}}, r"others must have names as keys, got 3"),
    ],
)
def test_what_makes_no_run_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        TrainingRun(**{"model": TinyModel(), **arguments})


def test_an_optimizer_that_has_made_no_step_yet_loses_its_state(tmp_path: Path) -> None:
    run, fresh = new_run(), new_run()
    CheckpointFolder(tmp_path).save(0, run)
    train_run(run, 2)
    CheckpointFolder(tmp_path).load(run)
    for one in (run, fresh):
        train_run(one, 2)
    assert_same(parameters_of(run), parameters_of(fresh))


def test_an_optimizer_of_something_else_is_named(tmp_path: Path) -> None:
    stranger = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    run = TrainingRun(model=TinyModel(), optimizers=[stranger])
    with pytest.raises(ValueError, match=r"parameters of the model alone, got one of shape \[3\]"):
        CheckpointFolder(tmp_path).save(1, run)


@pytest.mark.parametrize("is_async", [False, True])
def test_tensors_are_written_in_chunks(
    is_async: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks have 3 rows, or one where a row is larger."""
    run, loaded = new_run(), new_run()
    for one in (run, loaded):
        one.model.register_buffer("deep", torch.arange(2.0 * 3 * 8).reshape(2, 3, 8))
    train_run(run, 2)
    expected = parameters_of(run)
    monkeypatch.setattr(save_planner, "CHUNK_BYTES", 3 * 4 * 4 + 1)
    folder = CheckpointFolder(tmp_path)
    folder.save(2, run, wait=not is_async)
    folder.wait()
    loaded.model.get_buffer("deep").zero_()
    folder.load(loaded)
    assert_same(parameters_of(loaded), expected)
    for ours, theirs in zip(run.optimizers, loaded.optimizers, strict=True):
        for number, entry in ours.state_dict()["state"].items():
            assert_same(theirs.state_dict()["state"][number], entry)
    saved = FileSystemReader(tmp_path / "step-000000002").read_metadata().state_dict_metadata
    chunks = {name: len(entry.chunks) for name, entry in saved.items()}
    assert chunks["model.tables.embedding_bags.f0.weight"] == 8
    assert chunks["optimizers.0.state.tables.embedding_bags.f1.weight.sum"] == 8
    assert chunks["model.deep"] == 2
