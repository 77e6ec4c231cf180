"""``torch.amp.GradScaler`` with tables and dense parameters."""

from typing import Any

import pytest
import torch
from torch import nn

import torchembed.optim
from tests.support.tolerance import assert_same_bits
from tests.support.twins import (
    NAMES,
    TablesAndLayer,
    assert_trains_as,
    backward,
    batch,
    make,
    rows,
    weight,
    weights,
)
from torchembed.optim import SGD, Adam


def scaler_on(device: torch.device, **settings: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(device.type, init_scale=1024.0, **settings)


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_a_scaled_step_is_the_unscaled_one(kind: Any, device: torch.device) -> None:
    # Bit for bit, since the scale is a power of two.
    plain, scaled = TablesAndLayer(device), TablesAndLayer(device)
    optimizers = [
        (kind(m.tables.parameters(), lr=0.01), torch.optim.SGD(m.dense.parameters(), lr=0.01))
        for m in (plain, scaled)
    ]
    scaler = scaler_on(device)
    for step in range(3):
        for optimizer in (*optimizers[0], *optimizers[1]):
            optimizer.zero_grad()
        plain.loss(step).backward()
        scaler.scale(scaled.loss(step)).backward()
        for optimizer in optimizers[0]:
            optimizer.step()
        for optimizer in optimizers[1]:
            scaler.step(optimizer)
        scaler.update()
    for name, parameter in weights(scaled.tables).items():
        assert_same_bits(parameter, weight(plain.tables, name))
    assert_same_bits(scaled.dense.weight, plain.dense.weight)


def test_a_step_with_an_infinite_gradient_is_skipped(device: torch.device) -> None:
    model = TablesAndLayer(device)
    fused, dense = Adam(model.tables.parameters()), torch.optim.SGD(model.dense.parameters())
    scaler = scaler_on(device)
    before = rows(model.tables)
    scaler.scale(model.loss(0) * float("inf")).backward()
    scaler.step(fused)
    scaler.step(dense)
    scaler.update()
    assert scaler.get_scale() == 512.0
    for name, parameter in weights(model.tables).items():
        assert_same_bits(parameter, before[name])
    for entry in fused.state_dict()["state"].values():
        assert all(value.count_nonzero() == 0 for value in entry.values())
    # The gradients are gone, and the next step is an ordinary one.
    model.zero_grad()
    scaler.scale(model.loss(1)).backward()
    scaler.step(fused)
    scaler.step(dense)
    scaler.update()
    assert all(entry["step"].item() == 1 for entry in fused.state_dict()["state"].values())
    assert all(not torch.equal(weight(model.tables, name), before[name]) for name in NAMES)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_one_bad_table_skips_all_of_the_optimizer(bad: float, device: torch.device) -> None:
    # As with torch's optimizers; "c" is in another group than "a" and "b".
    model = TablesAndLayer(device)
    fused, dense = SGD(model.tables.parameters()), torch.optim.SGD(model.dense.parameters())
    scaler = scaler_on(device)
    before, dense_before = rows(model.tables), model.dense.weight.detach().clone()
    values = model.tables(batch(0).jagged(device)).values()
    loss = model.dense(values.detach()).sum() + values[:, 8:].sum() * bad + values[:, :8].sum()
    scaler.scale(loss).backward()
    scaler.step(fused)
    scaler.step(dense)
    scaler.update()
    for name, parameter in weights(model.tables).items():
        assert_same_bits(parameter, before[name])
    assert not torch.equal(model.dense.weight, dense_before)


@pytest.mark.parametrize("with_dense", [True, False])
@pytest.mark.parametrize("overflows", [True, False])
def test_our_scale_also_follows_the_tables(
    with_dense: bool, overflows: bool, device: torch.device
) -> None:
    model = TablesAndLayer(device)
    fused, dense = SGD(model.tables.parameters()), torch.optim.SGD(model.dense.parameters())
    scaler = torchembed.optim.GradScaler(device.type, init_scale=1024.0, growth_interval=1)
    before = rows(model.tables)
    values = model.tables(batch(0).jagged(device)).values()
    bad = float("inf") if overflows else 1.0
    scaler.scale(model.dense(values.detach()).sum() + values[:, 8:].sum() * bad).backward()
    scaler.step(fused)
    if with_dense:
        scaler.step(dense)
    scaler.update()
    assert scaler.get_scale() == (512.0 if overflows else 2048.0)
    assert torch.equal(weight(model.tables, "c"), before["c"]) == overflows
    # The flag was of that step alone.
    model.zero_grad()
    scaler.scale(model.loss(1)).backward()
    scaler.step(fused)
    scaler.update()
    assert scaler.get_scale() == (1024.0 if overflows else 4096.0)


def test_a_forgotten_step_is_noticed(device: torch.device) -> None:
    model = TablesAndLayer(device)
    fused = SGD(model.tables.parameters())
    scaler = torchembed.optim.GradScaler(device.type, init_scale=1024.0)
    scaler.scale(model.loss(0)).backward()
    message = r"update\(\) must come after scaler\.step\(optimizer\), and none was called"
    with pytest.raises(RuntimeError, match=message):
        scaler.update()
    scaler.step(fused)
    scaler.update()
    with pytest.raises(RuntimeError, match=message):
        scaler.update()
    scaler.update(2.0)
    assert scaler.get_scale() == 2.0


def test_a_disabled_scaler_of_ours_steps_as_without(device: torch.device) -> None:
    model = TablesAndLayer(device)
    fused = SGD(model.tables.parameters())
    scaler = torchembed.optim.GradScaler(device.type, enabled=False)
    before = rows(model.tables)
    scaler.scale(model.loss(0)).backward()
    scaler.step(fused)
    scaler.update()
    assert all(not torch.equal(weight(model.tables, name), before[name]) for name in NAMES)


@pytest.mark.parametrize("of_ours", [False, True])
def test_torchs_recipe_for_clipping_scaled_gradients(of_ours: bool, device: torch.device) -> None:
    # Bit for bit, since the scale is a power of two.
    kind = torchembed.optim.GradScaler if of_ours else torch.amp.GradScaler
    plain, scaled = TablesAndLayer(device), TablesAndLayer(device)
    scaler = kind(device.type, init_scale=1024.0)
    for model in (plain, scaled):
        fused = Adam(model.tables.parameters(), lr=0.01)
        dense = torch.optim.SGD(model.dense.parameters(), lr=0.01)
        for step in range(3):
            model.zero_grad()
            (scaler.scale(model.loss(step)) if model is scaled else model.loss(step)).backward()
            if model is scaled:
                scaler.unscale_(fused)
                scaler.unscale_(dense)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for optimizer in (fused, dense):
                if model is scaled:
                    scaler.step(optimizer)
                else:
                    optimizer.step()
            if model is scaled:
                scaler.update()
    for name, parameter in weights(scaled.tables).items():
        assert_same_bits(parameter, weight(plain.tables, name))
    assert_same_bits(scaled.dense.weight, plain.dense.weight)


def test_unscaled_gradients_that_are_infinite_skip_the_step(device: torch.device) -> None:
    model = TablesAndLayer(device)
    fused, dense = SGD(model.tables.parameters()), torch.optim.SGD(model.dense.parameters())
    scaler = scaler_on(device)
    before = rows(model.tables)
    scaler.scale(model.loss(0) * float("inf")).backward()
    for optimizer in (fused, dense):
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    scaler.update()
    for name, parameter in weights(model.tables).items():
        assert_same_bits(parameter, before[name])


def test_clipping_under_a_scaler(device: torch.device) -> None:
    # The gradients of tables are still scaled where they are clipped: so must the bound be.
    def train_ours(module: nn.Module) -> None:
        optimizer = SGD(module.parameters(), lr=0.1)
        scaler = scaler_on(device)
        dense = nn.Parameter(torch.ones(1, device=device))
        dense_optimizer = torch.optim.SGD([dense], lr=0.0)
        scaler.scale(dense.sum()).backward()
        backward(module, 0, scale=scaler.get_scale())
        torchembed.optim.clip_grad_norm_(module.parameters(), 0.5 * scaler.get_scale())
        scaler.step(optimizer)
        scaler.step(dense_optimizer)
        scaler.update()

    def train_theirs(module: nn.Module) -> None:
        backward(module, 0, scale=1024.0)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5 * 1024.0)
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.data -= 0.1 * (parameter.grad / 1024.0)

    assert_trains_as(make(device), train_ours, train_theirs)


def test_a_disabled_scaler_steps_as_without(device: torch.device) -> None:
    model, expected = make(device), make(device)
    optimizers = [SGD(m.parameters(), lr=0.1) for m in (model, expected)]
    scaler = scaler_on(device, enabled=False)
    backward(model, 0)
    backward(expected, 0)
    scaler.step(optimizers[0])
    scaler.update()
    optimizers[1].step()
    for name in NAMES:
        assert_same_bits(weight(model, name), weight(expected, name))
