"""Frozen tables, and what happens where groups change while gradients are recorded."""

import pytest
import torch

import torchembed
from tests.support.three_tables import assert_in_groups, features, make, train, weights
from tests.support.tolerance import assert_same_bits


def test_frozen_tables_get_no_gradient(device: torch.device) -> None:
    for frozen in range(3):
        module = make(device)
        weights(module)[frozen].requires_grad_(False)
        train(module)
        grads = [parameter.grad is not None for parameter in weights(module)]
        assert grads == [number != frozen for number in range(3)]
        assert_in_groups(module)


def test_frozen_tables_are_not_updated_and_keep_their_state(device: torch.device) -> None:
    module = make(device)
    optimizer = torchembed.optim.Adagrad(module.parameters(), lr=1.0)
    train(module)
    optimizer.step()
    for frozen in range(3):
        table = weights(module)[frozen]
        before = [parameter.detach().clone() for parameter in weights(module)]
        sums = [entry["sum"].clone() for entry in optimizer.state_dict()["state"].values()]
        table.requires_grad_(False)
        train(module)
        optimizer.step()
        for number, (parameter, old) in enumerate(zip(weights(module), before, strict=True)):
            assert torch.equal(parameter, old) == (number == frozen)
        for number, old_sum in enumerate(sums):
            new_sum = optimizer.state_dict()["state"][number]["sum"]
            assert torch.equal(new_sum, old_sum) == (number == frozen)
        table.requires_grad_(True)
        assert_in_groups(module)
    assert len(module._table_set.groups) == 1


def test_all_tables_frozen(device: torch.device) -> None:
    module = make(device).requires_grad_(False)
    assert not module(features(device)).values().requires_grad


def test_freezing_before_a_step_raises_and_loses_nothing(device: torch.device) -> None:
    module = make(device)
    optimizer = torchembed.optim.SGD(module.parameters(), lr=1.0)
    before = weights(module)[0].detach().clone()
    train(module)
    weights(module)[1].requires_grad_(False)
    message = "table a has gradients that no optimizer step has applied; call step"
    with pytest.raises(RuntimeError, match=message):
        module(features(device))
    optimizer.step()
    assert (before - weights(module)[0]).round().sum(1).tolist() == [4, 0, 4]
    train(module)
    assert_in_groups(module)


def test_regrouping_between_forward_and_backward_raises(device: torch.device) -> None:
    module = make(device)
    torchembed.optim.SGD(module.parameters(), lr=1.0)
    output = module(features(device)).values().sum()
    weights(module)[1].requires_grad_(False)
    module(features(device))
    with pytest.raises(
        RuntimeError, match="tables a, b, c were regrouped between forward and back"
    ):
        output.backward()


def test_assigning_rows_before_a_step_raises_and_loses_nothing(device: torch.device) -> None:
    module, other = make(device), make(device, seed=1)
    optimizer = torchembed.optim.SGD(module.parameters(), lr=1.0)
    train(module)
    with pytest.raises(RuntimeError, match="table a has gradients that no optimizer step has appl"):
        module.load_state_dict(other.state_dict(), assign=True)
    optimizer.zero_grad()
    assert_in_groups(module)
    assert_same_bits(weights(module)[2], weights(other)[2])


def test_a_regrouping_in_inference_mode_can_be_trained(device: torch.device) -> None:
    module = make(device)
    optimizer = torchembed.optim.Adagrad(module.parameters(), lr=1.0)
    weights(module)[1].requires_grad_(False)
    before = weights(module)[0].detach().clone()
    with torch.inference_mode():
        module(features(device))
    train(module)
    optimizer.step()
    assert (before - weights(module)[0]).round().sum(1).tolist() == [4, 0, 4]
