"""Tables and dense parameters under one optimizer, beside one for each."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import torchembed
from tests.support.tolerance import assert_same_bits
from tests.support.twins import TablesAndLayer
from torchembed.checkpoints.run.training_run import TrainingRun
from torchembed.optim import (
    SGD,
    Adagrad,
    Adam,
    DenseAdagrad,
    DenseAdam,
    DenseSGD,
    GradScaler,
    JointOptimizer,
    RowwiseAdagrad,
)
from torchembed.step.pipeline import TrainPipeline

KINDS = [
    (SGD, DenseSGD),
    (Adagrad, DenseAdagrad),
    (RowwiseAdagrad, DenseAdagrad),
    (Adam, DenseAdam),
]


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert_same_bits(ours.detach(), theirs.detach())


@pytest.mark.parametrize(("kind", "dense_kind"), KINDS)
def test_it_does_what_both_do(kind: Any, dense_kind: Any, device: torch.device) -> None:
    apart, joint = TablesAndLayer(device), TablesAndLayer(device)
    optimizers = [kind(apart.tables.parameters(), lr=0.1), dense_kind([apart.dense.weight], lr=0.1)]
    both = kind.with_dense(joint.parameters(), lr=0.1)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (*optimizers, both)]
    for step in range(3):
        for optimizer in (*optimizers, both):
            optimizer.zero_grad()
        for model in (apart, joint):
            model.loss(step).backward()
        for optimizer in (*optimizers, both):
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        assert_equal(apart, joint)
    assert [type(part) for part in both.optimizers] == [kind, dense_kind]
    assert all(parameter.grad is None for parameter in joint.tables.parameters())


def test_a_state_is_loaded(device: torch.device) -> None:
    model = TablesAndLayer(device)
    optimizer = Adam.with_dense(model.parameters(), lr=0.1)
    model.loss(0).backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    other = TablesAndLayer(device)
    other.load_state_dict(model.state_dict())
    loaded = Adam.with_dense(other.parameters(), lr=7.0)
    scheduler = torch.optim.lr_scheduler.StepLR(loaded, 1, 0.5)
    loaded.load_state_dict(state)
    assert [group["lr"] for group in loaded.param_groups] == [0.1, 0.1]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    assert numbers == list(range(len(list(model.parameters())))) == sorted(state["state"])
    for each, of in ((model, optimizer), (other, loaded)):
        of.zero_grad()
        each.loss(1).backward()
        of.step()
    assert_equal(model, other)
    scheduler.step()
    assert [part.param_groups[0]["lr"] for part in loaded.optimizers] == [0.05, 0.05]
    state["param_groups"].pop()
    with pytest.raises(ValueError, match="param_groups of the state must be 2, got 1"):
        loaded.load_state_dict(state)


def test_groups_are_those_of_parts_that_are_loaded_one_by_one(device: torch.device) -> None:
    """As a checkpoint loads them."""
    optimizer = Adam.with_dense(TablesAndLayer(device).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for part in optimizer.optimizers:
        part.load_state_dict(part.state_dict())
    scheduler.step(1.0)
    optimizer.step()
    scheduler.step(2.0)
    assert [part.param_groups[0]["lr"] for part in optimizer.optimizers] == [0.05, 0.05]


def without_a_dense_state(state: dict[str, Any]) -> None:
    del state["state"][max(state["state"])]["exp_avg"]


def without_a_dense_parameter(state: dict[str, Any]) -> None:
    state["param_groups"][-1]["params"].pop()


def with_a_rule_of_torch(state: dict[str, Any]) -> None:
    state["param_groups"][-1]["amsgrad"] = True


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_a_dense_state, "state of parameter 0 must hold"),
        (without_a_dense_parameter, r"must be 1, of \[1\] parameters, got 1, of \[0\]"),
        (with_a_rule_of_torch, "amsgrad of the loaded param_groups must be False"),
    ],
)
def test_a_dense_state_that_does_not_fit_changes_no_table(
    spoil: Any, message: str, device: torch.device
) -> None:
    model = TablesAndLayer(device)
    optimizer = Adam.with_dense(model.parameters(), lr=0.1)
    before = copy.deepcopy(optimizer.state_dict())
    model.loss(0).backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 7.0
    spoil(state)
    other = Adam.with_dense(TablesAndLayer(device).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state)
    after = other.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, entry in before["state"].items():
        for name, tensor in entry.items():
            assert_same_bits(after["state"][number][name], tensor)


def test_groups_and_what_only_tables_have(device: torch.device) -> None:
    model = TablesAndLayer(device)
    groups = [
        {"params": model.dense.parameters(), "lr": 0.5},
        {"params": model.tables.parameters(), "max_gradient": 1.0},
    ]
    optimizer = SGD.with_dense(groups, lr=0.25, stochastic_rounding=False)
    tables, dense = optimizer.param_groups
    assert (tables["lr"], tables["max_gradient"], dense["lr"]) == (0.25, 1.0, 0.5)
    assert "max_gradient" not in dense


def test_parameters_may_have_names(device: torch.device) -> None:
    models = [TablesAndLayer(device) for _ in range(2)]
    optimizers = [
        Adam.with_dense(models[0].parameters(), lr=0.1),
        Adam.with_dense(models[1].named_parameters(), lr=0.1),
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        model.loss(0).backward()
        optimizer.step()
    assert_equal(*models)
    names = [name for group in optimizers[1].param_groups for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in models[1].named_parameters())
    optimizers[1].load_state_dict(optimizers[1].state_dict())


def test_one_kind_alone(device: torch.device) -> None:
    model = TablesAndLayer(device)
    assert [type(o) for o in SGD.with_dense(model.dense.parameters()).optimizers] == [DenseSGD]
    assert [type(o) for o in SGD.with_dense(model.tables.parameters()).optimizers] == [SGD]
    with pytest.raises(ValueError, match="params must hold at least one parameter, got none"):
        SGD.with_dense([])


def test_under_a_scaler(device: torch.device) -> None:
    plain, scaled = TablesAndLayer(device), TablesAndLayer(device)
    optimizers = [SGD.with_dense(model.parameters(), lr=0.1) for model in (plain, scaled)]
    scaler = GradScaler(device.type, init_scale=1024.0)
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        plain.loss(step).backward()
        optimizers[0].step()
        scaler.scale(scaled.loss(step)).backward()
        if step:
            scaler.unscale_(optimizers[1])
        scaler.step(optimizers[1])
        scaler.update()
        assert_equal(plain, scaled)
    torchs = torch.amp.GradScaler(device.type)
    torchs.scale(scaled.loss(0)).backward()
    with pytest.raises(RuntimeError, match="cannot step tables and dense parameters together"):
        torchs.step(optimizers[1])
    optimizers[1].zero_grad()
    scaled.loss(0).backward()
    optimizers[1].step()


def test_a_closure_is_called_once(device: torch.device) -> None:
    model, calls = TablesAndLayer(device), []
    optimizer = SGD.with_dense(model.parameters(), lr=0.1)

    def closure() -> float:
        calls.append(1)
        loss = model.loss(0)
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) > 0 and calls == [1]


def test_who_takes_optimizers_takes_it_apart(device: torch.device) -> None:
    model = TablesAndLayer(device)
    optimizer = SGD.with_dense(model.parameters(), lr=0.1)
    assert isinstance(optimizer, JointOptimizer)
    assert TrainingRun(model=model, optimizers=[optimizer]).optimizers == optimizer.optimizers
    pipeline = TrainPipeline(model, None, [optimizer], capture=False)
    assert pipeline.optimizers == optimizer.optimizers


def test_groups_are_added_to_the_parts(device: torch.device) -> None:
    optimizer = SGD.with_dense(TablesAndLayer(device).parameters())
    with pytest.raises(TypeError, match="add_param_group is of the parts"):
        optimizer.add_param_group({"params": [torch.ones(2, requires_grad=True)]})


def test_a_scheduler_knows_that_the_parts_were_stepped(device: torch.device) -> None:
    """Torch warns, an error here, of a scheduler that is stepped before its optimizer."""
    model = TablesAndLayer(device)
    optimizer = SGD.with_dense(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    model.loss(0).backward()
    for part in optimizer.optimizers:
        part.step()
    scheduler.step()
    assert {group["lr"] for group in optimizer.param_groups} == {0.05}


def test_it_is_not_copied() -> None:
    optimizer = SGD.with_dense(torchembed.Embedding(5, 3).parameters(), lr=0.1)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="by with_dense cannot be copied or pickled, since it "):
            duplicate(optimizer)


def test_parameters_are_split_into_those_of_tables_and_dense_ones() -> None:
    bag, dense = torchembed.EmbeddingBag(10, 4), torch.nn.Linear(4, 1)
    model = torch.nn.Sequential(bag, dense)
    tables, others = torchembed.optim.split_parameters(model.parameters())
    assert [p is bag.weight for group in tables for p in group["params"]] == [True]
    assert [id(p) for group in others for p in group["params"]] == list(map(id, dense.parameters()))
    grouped = [{"params": model.parameters(), "lr": 0.5}, {"params": [], "lr": 1.0}]
    split = torchembed.optim.split_parameters(grouped)
    assert [group["lr"] for group in (*split.tables, *split.dense)] == [0.5, 0.5]
    assert torchembed.optim.split_parameters(dense.parameters()).tables == []
    named = torchembed.optim.split_parameters(model.named_parameters())
    names = [[name for name, _ in group["params"]] for part in named for group in part]
    assert names == [["0.weight"], ["1.weight", "1.bias"]]
    with pytest.raises(TypeError, match=r"got Linear; pass model\.parameters\(\)"):
        torchembed.optim.split_parameters(dense)  # type: ignore[arg-type]
