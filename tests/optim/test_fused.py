"""Which tables a fused optimizer updates, and from when on."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import torchembed
import torchembed.optim
from tests.support.tolerance import assert_same_bits
from tests.support.twins import NAMES, backward, make, rows, weight, weights
from torchembed.optim import SGD, Adagrad, Adam
from torchembed.tables import TableGradient


def changed(module: nn.Module, before: dict[str, torch.Tensor]) -> list[str]:
    """The tables that changed."""
    return [name for name in NAMES if not torch.equal(weight(module, name), before[name])]


def test_weight_grad_stands_for_what_is_recorded(device: torch.device) -> None:
    module = make(device)
    optimizer = SGD(module.parameters(), lr=0.1)
    assert all(parameter.grad is None for parameter in module.parameters())
    backward(module, 0)
    assert all(isinstance(parameter.grad, TableGradient) for parameter in module.parameters())
    optimizer.step()
    assert all(parameter.grad is None for parameter in module.parameters())


def test_some_tables_may_be_left_to_torch(device: torch.device) -> None:
    module = make(device)
    optimizer = SGD([weight(module, "b")], lr=0.1)
    backward(module, 0)
    stand_for = [isinstance(weight(module, name).grad, TableGradient) for name in NAMES]
    assert stand_for == [False, True, False]
    before = rows(module)
    optimizer.step()
    assert changed(module, before) == ["b"]
    torch.optim.SGD([weight(module, "a"), weight(module, "c")], lr=0.1).step()
    assert changed(module, before) == ["a", "b", "c"]


def test_two_optimizers_share_a_module(device: torch.device) -> None:
    module = make(device)
    adam = Adam([weight(module, "a"), weight(module, "c")], lr=0.1)
    backward(module, 0)
    adam.step()
    state = copy.deepcopy(adam.state_dict()["state"])
    sgd = SGD([weight(module, "b")], lr=0.1)  # splits a group; the other's state moves along
    for number, entry in adam.state_dict()["state"].items():
        for key, value in entry.items():
            assert_same_bits(value, state[number][key])
    weight(module, "b").grad = None

    backward(module, 1)
    before = rows(module)
    sgd.step()
    assert changed(module, before) == ["b"]
    adam.step()
    assert changed(module, before) == ["a", "b", "c"]
    backward(module, 2)
    sgd.zero_grad()
    before = rows(module)
    sgd.step()
    adam.step()
    assert changed(module, before) == ["a", "c"]

    expected = make(device)
    twin = Adam([weight(expected, "a"), weight(expected, "c")], lr=0.1)
    for step in range(3):
        backward(expected, step)
        twin.step()
    for name in ("a", "c"):
        assert_same_bits(weight(module, name), weight(expected, name))


def test_tables_that_come_together_have_done_the_most_steps(device: torch.device) -> None:
    for frozen in ("a", "b"):
        module = make(device)
        optimizer = Adam(module.parameters(), lr=0.1)
        weight(module, frozen).requires_grad_(False)
        for step in range(3):
            backward(module, step)
            optimizer.step()
        weight(module, frozen).requires_grad_(True)
        backward(module, 3)
        optimizer.step()
        counts = [entry["step"].item() for entry in optimizer.state_dict()["state"].values()]
        assert counts == [4, 4, 4]


def test_another_optimizer_takes_tables_over(device: torch.device) -> None:
    module = make(device)
    first = Adam(module.parameters(), lr=0.1)
    for step in range(3):
        backward(module, step)
        first.step()
    second = Adam([weight(module, "a")], lr=0.1)
    # It starts as a new one does.
    assert second.state[weight(module, "a")]["step"].item() == 0
    assert second.state[weight(module, "a")]["exp_avg"].count_nonzero() == 0
    message = "table a was taken over by another optimizer; use that one"
    for use in (first.step, first.state_dict):
        with pytest.raises(RuntimeError, match=message):
            use()
    backward(module, 3)
    first.zero_grad()  # discards what it still has, "b" and "c"
    before = rows(module)
    second.step()
    assert changed(module, before) == ["a"]

    third = SGD(module.parameters(), lr=0.1)
    for optimizer in (first, second):
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
    third.zero_grad()
    before = rows(module)
    backward(module, 4)
    third.step()
    assert changed(module, before) == list(NAMES)


def test_taking_over_needs_the_gradients_to_be_applied(device: torch.device) -> None:
    module = make(device)
    first = SGD(module.parameters(), lr=0.1)
    backward(module, 0)
    before = rows(module)
    message = "table c has gradients that its optimizer has not applied; call its step"
    with pytest.raises(RuntimeError, match=message):
        Adagrad([weight(module, "c")])
    first.step()  # still the owner
    assert changed(module, before) == list(NAMES)
    Adagrad([weight(module, "c")])


def test_an_optimizer_that_is_gone_leaves_its_tables_to_the_next(device: torch.device) -> None:
    module = make(device)
    for _ in range(3):
        optimizer = SGD(module.parameters(), lr=0.1)
        backward(module, 0)
        before = rows(module)
        optimizer.step()
        assert changed(module, before) == list(NAMES)
        del optimizer


def test_a_gradient_from_before_is_not_lost_silently(device: torch.device) -> None:
    module = make(device)
    values = module(features_of(device)).values()
    optimizer = SGD(module.parameters(), lr=0.1)
    values.sum().backward()
    with pytest.raises(
        RuntimeError, match=r"weight\.grad of a table is set, .* call zero_grad\(\)"
    ):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()


def features_of(device: torch.device) -> torchembed.SparseFeatures:
    ids = torch.tensor([1, 2, 3], device=device)
    return torchembed.SparseFeatures(keys=NAMES, values=ids, batch_size=1, hotness=(1, 1, 1))


def test_tables_may_be_added_later(device: torch.device) -> None:
    module = make(device)
    optimizer = Adagrad([weight(module, "a")], lr=0.1)
    backward(module, 0)
    optimizer.step()
    module.zero_grad()
    optimizer.add_param_group({"params": [weight(module, "b")], "lr": 0.5})
    expected = make(device)
    twin = Adagrad([weight(expected, "a")], lr=0.1)
    backward(expected, 0)
    twin.step()
    module.zero_grad()
    for step in (1, 2):
        backward(module, step)
        before = rows(module)
        optimizer.step()
        assert changed(module, before) == ["a", "b"]
        backward(expected, step)
        twin.step()
    assert_same_bits(weight(module, "a"), weight(expected, "a"))
    assert len(optimizer.state_dict()["state"]) == 2

    with pytest.raises(TypeError, match="params must be weights of torchembed tables"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 2
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        optimizer.add_param_group({"params": [weight(module, "b")]})


def test_named_parameters_are_taken(device: torch.device) -> None:
    module = make(device)
    optimizer = SGD(module.named_parameters(), lr=0.1)
    backward(module, 0)
    before = rows(module)
    optimizer.step()
    assert changed(module, before) == list(NAMES)


def test_an_embedding_and_a_bag_share_an_optimizer(device: torch.device) -> None:
    embedding = torchembed.Embedding(5, 3, device=device)
    bag = torchembed.EmbeddingBag(5, 3, device=device, mode="sum")
    optimizer = SGD([embedding.weight, bag.weight], lr=1.0)
    before = [m.weight.detach().clone() for m in (embedding, bag)]
    ids = torch.tensor([[1, 2], [2, 2]], device=device)
    (embedding(ids).sum() + bag(ids).sum()).backward()
    optimizer.step()
    for module, old in zip((embedding, bag), before, strict=True):
        assert (old - module.weight).sum(1).round().tolist() == [0, 3, 9, 0, 0]


def test_dense_parameters_are_refused(device: torch.device) -> None:
    module = nn.ModuleDict({"tables": make(device), "dense": nn.Linear(3, 2, device=device)})
    message = (
        r"params must be weights of torchembed tables, got an ordinary tensor of shape \(2, 3\)"
    )
    with pytest.raises(TypeError, match=message):
        SGD(module.parameters(), lr=0.1)
    # Nothing was taken over.
    backward(module["tables"], 0)
    assert all(parameter.grad is not None for parameter in module["tables"].parameters())


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (SGD, {"lr": -0.1}, "lr must not be negative, got -0.1"),
        (SGD, {"lr": float("nan")}, "lr must not be negative, got nan"),
        (SGD, {"weight_decay": -1.0}, "weight_decay must not be negative"),
        (SGD, {"max_gradient": -1.0}, "max_gradient must not be negative"),
        (Adagrad, {"lr_decay": -1.0}, "lr_decay must not be negative"),
        (Adagrad, {"initial_accumulator_value": -1.0}, "initial_accumulator_value must not be neg"),
        (Adam, {"eps": -1.0}, "eps must not be negative"),
        (SGD, {"lr": "0.1"}, "lr must be a number, got '0.1'"),
        (Adam, {"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        (Adam, {"betas": (0.9,)}, r"betas must be two numbers in \[0, 1\), got \(0.9,\)"),
    ],
)
def test_settings_out_of_range_are_refused(
    kind: Any, settings: dict[str, Any], message: str
) -> None:
    module = make("cpu")
    with pytest.raises((ValueError, TypeError), match=message):
        kind(module.parameters(), **settings)
    assert all(group.rule is None for group in module._table_set.groups)


@pytest.mark.parametrize("params", [[], iter(()), [{"params": []}]])
def test_no_tables_are_stepped_like_some(params: Any) -> None:
    """As on a rank that holds none."""
    optimizer, module = SGD(params, lr=0.1), torch.nn.Linear(2, 1)
    dense = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    optimizer.zero_grad()
    optimizer.step()
    scaler.scale(module(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.step(dense)
    scaler.update()
    state = optimizer.state_dict()
    assert state["state"] == {}
    optimizer.load_state_dict(state)
    optimizer.add_param_group({"params": list(make("cpu").parameters())})
    assert len(optimizer.recorded()) == 0


def test_an_optimizer_is_not_copied() -> None:
    module = make("cpu")
    optimizer = SGD(module.parameters(), lr=0.1)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(
            TypeError, match="SGD cannot be copied or pickled, since it is bound to"
        ):
            duplicate(optimizer)


def test_initial_state(device: torch.device) -> None:
    module = make(device)
    optimizer = Adagrad(module.parameters(), initial_accumulator_value=0.25)
    for parameter in weights(module).values():
        state = optimizer.state[parameter]["sum"]
        assert_same_bits(state, torch.full(parameter.shape, 0.25))
