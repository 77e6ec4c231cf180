"""State dicts: resumed equals uninterrupted, and what does not fit changes nothing."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.tolerance import assert_same_bits
from tests.support.twins import NAMES, backward, make, rows, weight, weights
from torchembed.optim import SGD, Adagrad, Adam, RowwiseAdagrad
from torchembed.optim.fused import FusedOptimizer

KINDS = (SGD, Adagrad, RowwiseAdagrad, Adam)


def in_groups(module: nn.Module) -> list[dict[str, Any]]:
    first, second, third = module.parameters()
    return [{"params": [first, third]}, {"params": [second], "lr": 0.5}]


def train(module: nn.Module, optimizer: FusedOptimizer, first: int, last: int) -> None:
    for step in range(first, last):
        backward(module, step)
        optimizer.step()


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_equals_uninterrupted(
    kind: type[FusedOptimizer], dtype: torch.dtype, device: torch.device
) -> None:
    module = make(device, dtype)
    optimizer = kind(in_groups(module), lr=0.1)  # type: ignore[call-arg]
    train(module, optimizer, 0, 3)
    saved = through_a_file({"model": module.state_dict(), "optimizer": optimizer.state_dict()})
    train(module, optimizer, 3, 6)

    resumed = make(device, dtype)
    # Hyperparameters come from the state dict.
    other = kind(in_groups(resumed), lr=77.0, weight_decay=7.0)  # type: ignore[call-arg]
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    train(resumed, other, 3, 6)
    for name, parameter in weights(module).items():
        assert_same_bits(parameter, weight(resumed, name))
    expected, found = optimizer.state_dict(), other.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    for number, entry in expected["state"].items():
        assert entry.keys() == found["state"][number].keys()
        for key, value in entry.items():
            assert_same_bits(found["state"][number][key], value)


def test_the_state_is_torchs_form(device: torch.device) -> None:
    module = make(device)
    optimizer = Adam(in_groups(module), lr=0.1)
    train(module, optimizer, 0, 2)
    state = optimizer.state_dict()
    assert [group["params"] for group in state["param_groups"]] == [[0, 1], [2]]
    assert [group["lr"] for group in state["param_groups"]] == [0.1, 0.5]
    shapes = [tuple(entry["exp_avg"].shape) for entry in state["state"].values()]
    assert shapes == [(7, 4), (6, 3), (5, 4)]
    assert all(entry["step"].item() == 2 for entry in state["state"].values())
    assert optimizer.state[weight(module, "b")]["exp_avg_sq"].shape == (5, 4)


def test_loading_does_not_share_memory_with_the_state_dict(device: torch.device) -> None:
    module = make(device)
    optimizer = Adagrad(module.parameters(), lr=0.1)
    train(module, optimizer, 0, 1)
    state = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(state["state"])
    optimizer.load_state_dict(state)
    train(module, optimizer, 1, 2)
    for number, entry in kept.items():
        assert_same_bits(state["state"][number]["sum"], entry["sum"])


def test_a_loaded_learning_rate_is_used(device: torch.device) -> None:
    module = make(device)
    optimizer = SGD(module.parameters(), lr=0.5)
    train(module, optimizer, 0, 1)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.0
    optimizer.load_state_dict(state)
    before = rows(module)
    train(module, optimizer, 1, 2)
    for name, parameter in weights(module).items():
        assert_same_bits(parameter, before[name])


def without_a_table(state: dict[str, Any]) -> None:
    del state["state"][2]


def without_a_state(state: dict[str, Any]) -> None:
    del state["state"][2]["exp_avg_sq"]


def with_another_shape(state: dict[str, Any]) -> None:
    state["state"][2]["exp_avg_sq"] = torch.zeros(6, 4)


def without_a_group(state: dict[str, Any]) -> None:
    del state["param_groups"][1]


def with_another_group(state: dict[str, Any]) -> None:
    state["param_groups"][0]["params"].pop()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_a_table, r"state of table b must hold \['exp_avg', .*, 'step'\], got \[\]"),
        (without_a_state, r"state of table b must hold .*, got \['exp_avg', 'step'\]"),
        (with_another_shape, r"state exp_avg_sq of table b must have shape \(5, 4\), got \(6, 4\)"),
        (without_a_group, r"must be 2, of \[2, 1\] parameters, got 1, of \[2\]"),
        (with_another_group, r"must be 2, of \[2, 1\] parameters, got 2, of \[1, 1\]"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(
    spoil: Any, message: str, device: torch.device
) -> None:
    other = make(device)
    other_optimizer = Adam(in_groups(other), lr=0.9)
    train(other, other_optimizer, 3, 5)
    state = copy.deepcopy(other_optimizer.state_dict())
    spoil(state)

    module = make(device)
    optimizer = Adam(in_groups(module), lr=0.1)
    train(module, optimizer, 0, 2)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, entry in before["state"].items():
        for key, value in entry.items():
            assert_same_bits(after["state"][number][key], value)
    train(module, optimizer, 2, 3)


@pytest.mark.parametrize(("saved", "loaded"), [(SGD, Adagrad), (Adagrad, RowwiseAdagrad)])
def test_a_state_of_another_kind_is_refused(
    saved: type[FusedOptimizer], loaded: type[FusedOptimizer], device: torch.device
) -> None:
    state = saved(make(device).parameters(), lr=0.1).state_dict()  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"state (sum )?of table a must h"):
        loaded(make(device).parameters(), lr=0.1).load_state_dict(state)  # type: ignore[call-arg]


def test_a_state_of_torchs_optimizer_is_refused() -> None:
    module = make("cpu")
    saved = torch.optim.Adagrad(module.parameters()).state_dict()
    ours = Adagrad(module.parameters())
    with pytest.raises(ValueError, match=r"with max_gradient; .* of torch cannot be loaded"):
        ours.load_state_dict(saved)


def test_pending_gradients_survive_saving(device: torch.device) -> None:
    module, expected = make(device), make(device)
    optimizers = [SGD(m.parameters(), lr=0.1) for m in (module, expected)]
    for m in (module, expected):
        backward(m, 0)
    optimizers[0].state_dict()
    for optimizer in optimizers:
        optimizer.step()
    for name in NAMES:
        assert_same_bits(weight(module, name), weight(expected, name))
