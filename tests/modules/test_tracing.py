"""Calls with tensors that stand for others leave nothing behind in a module."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import torchembed
from tests.support.three_tables import NAMES, assert_in_groups, features, make, weights
from tests.support.tolerance import assert_same_bits, assert_same_sums
from torchembed import SparseFeatures
from torchembed.core.piece_order import PieceOrder
from torchembed.core.stand_ins import KeptTensors, is_stand_in, makes_stand_ins


class Model(nn.Module):
    """A collection under an interface of tensors."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.tables = make(device)

    def forward(self, values: Tensor) -> Tensor:
        batch = SparseFeatures(keys=NAMES[::-1], values=values, batch_size=2, hotness=(1, 1, 1))
        return self.tables(batch).values()


def ids(device: torch.device) -> Tensor:
    return torch.tensor([0, 2, 1, 2, 0, 1], device=device)


def call_with_fakes(module: nn.Module, *arguments: Any) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return module(*[mode.from_tensor(argument) for argument in arguments])


@pytest.mark.parametrize("was_called", [False, True])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_fake_call_leaves_the_module_as_it_was(
    is_frozen: bool, was_called: bool, device: torch.device
) -> None:
    model = Model(device)
    expected = Model(device)(ids(device))
    if was_called:
        model(ids(device))
    weights(model.tables)[1].requires_grad_(not is_frozen)  # regroups, in the fake call first
    assert is_stand_in(call_with_fakes(model, ids(device)))
    assert_same_bits(model(ids(device)), expected)
    assert_in_groups(model.tables)


def test_fake_calls_of_single_tables(device: torch.device) -> None:
    for module in (torchembed.EmbeddingBag(5, 3), torchembed.Embedding(5, 3)):
        module.to(device)
        arguments = ids(device)[:4].view(2, 2)
        assert is_stand_in(call_with_fakes(module, arguments))
        assert not is_stand_in(module(arguments))


@pytest.mark.parametrize("was_called", [False, True])
def test_an_exported_program_gives_what_the_module_gives(
    was_called: bool, device: torch.device
) -> None:
    model = Model(device)
    if was_called:
        model(ids(device))
    exported = torch.export.export(model, (ids(device),))
    assert_same_bits(exported.module()(ids(device)), model(ids(device)))
    assert set(exported.state_dict) == set(model.state_dict())
    with torch.no_grad():
        weights(model.tables)[0].fill_(7.0)
    assert (model(ids(device))[:, :4] == 7).all()


def test_a_model_made_of_fakes_is_called_with_fakes(device: torch.device) -> None:
    with FakeTensorMode() as mode:
        model = Model(device)
        for _ in range(2):
            assert is_stand_in(model(mode.from_tensor(ids(device))))


def test_a_transform_leaves_the_module_as_it_was(device: torch.device) -> None:
    model = Model(device)
    scale = torch.ones((), device=device)
    grad = torch.func.grad(lambda s: (s * model(ids(device))).sum())(scale)
    found = model(ids(device))
    # The same sum, in another order.
    sizes = found.detach().abs().sum()
    assert_same_sums(grad, found.sum(), sizes, num_roundings=found.numel())
    assert_in_groups(model.tables)


def test_jagged_bags_may_be_fake(device: torch.device) -> None:
    module = make(device)
    batch = features(device)
    offsets = torch.arange(7, device=device)

    def pooled(values: Tensor, offsets: Tensor) -> Tensor:
        jagged = SparseFeatures(keys=NAMES[::-1], values=values, batch_size=2, offsets=offsets)
        return module(jagged).values()

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = pooled(mode.from_tensor(batch.values), mode.from_tensor(offsets))
    assert is_stand_in(found) and tuple(found.shape) == (2, 12)
    assert_same_bits(pooled(batch.values, offsets), module(batch).values())


def test_kept_tensors_are_real() -> None:
    kept: KeptTensors[str, Tensor] = KeptTensors(limit=2)
    with FakeTensorMode():
        assert makes_stand_ins()
        assert is_stand_in(kept.get("a", lambda: torch.ones(2)))
    assert not makes_stand_ins()
    assert "a" not in kept
    first = kept.get("a", lambda: torch.ones(2))
    assert kept.get("a", lambda: torch.zeros(2)) is first
    kept.get("b", lambda: torch.ones(2))
    assert kept.is_full
    assert kept.get("c", lambda: torch.ones(2)).tolist() == [1.0, 1.0]
    assert "c" not in kept


@pytest.mark.gpu
def test_an_order_of_pieces_is_kept_real(device: torch.device) -> None:
    order, tensor = PieceOrder(), torch.arange(4, device=device)
    with FakeTensorMode() as mode:
        order(mode.from_tensor(tensor), [2, 2], [1, 0])
    assert order(tensor, [2, 2], [1, 0]).tolist() == [2, 3, 0, 1]
