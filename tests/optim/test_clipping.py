"""``clip_grad_norm_`` beside torch's, for tables with recorded gradients and for others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchembed.optim
from tests.support.tolerance import assert_follows, assert_same_bits
from tests.support.twins import (
    NUM_STEPS,
    TorchTwin,
    assert_trains_as,
    backward,
    batch,
    make,
    weight,
)
from torchembed.optim import SGD, clip_grad_norm_

Clip = Callable[..., Tensor]


def training(
    make_optimizer: Callable[..., Any], clip: Clip, norms: list[Tensor], *bounds: float
) -> Callable[[nn.Module], None]:
    """Steps in which all gradients are clipped to each of ``bounds`` in turn."""

    def train(module: nn.Module) -> None:
        norms.clear()
        optimizer = make_optimizer(module.parameters(), lr=0.1)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            backward(module, step)
            norms.extend(clip(module.parameters(), bound) for bound in bounds)
            optimizer.step()

    return train


def check(ours: nn.Module, make_optimizer: Callable[..., Any], *bounds: float) -> None:
    """Norms and tables are what torch makes of the twin."""
    found: list[Tensor] = []
    theirs: list[Tensor] = []
    train_theirs = training(torch.optim.SGD, torch.nn.utils.clip_grad_norm_, theirs, *bounds)
    assert_trains_as(ours, training(make_optimizer, clip_grad_norm_, found, *bounds), train_theirs)

    def norms(dtype: torch.dtype) -> Tensor:
        train_theirs(TorchTwin(dtype))
        return torch.stack(theirs).detach()

    assert_follows(torch.stack(found), norms)


@pytest.mark.parametrize("bound", [0.5, 20.0, 1e9])
def test_recorded_gradients(bound: float, device: torch.device) -> None:
    check(make(device), SGD, bound)


def test_clipping_twice(device: torch.device) -> None:
    check(make(device), SGD, 3.0, 1.0)


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_of_torchs_optimizers(sparse: bool, device: torch.device) -> None:
    check(make(device, sparse=sparse), torch.optim.SGD, 0.5)


def half_fused(parameters: Any, lr: float) -> Any:
    """Table "a" left to torch, the others fused."""
    first, *others = parameters

    class Both:
        def __init__(self) -> None:
            self.optimizers = [torch.optim.SGD([first], lr=lr), SGD(others, lr=lr)]

        def zero_grad(self) -> None:
            for optimizer in self.optimizers:
                optimizer.zero_grad()

        def step(self) -> None:
            for optimizer in self.optimizers:
                optimizer.step()

    return Both()


def test_one_norm_over_both_kinds(device: torch.device) -> None:
    check(make(device), half_fused, 0.5)


def test_gradients_recorded_after_clipping_are_not_clipped(device: torch.device) -> None:
    def train_with(library: Any, clip: Clip) -> Callable[[nn.Module], None]:
        def train(module: nn.Module) -> None:
            optimizer = library.SGD(module.parameters(), lr=0.1)
            backward(module, 0)
            clip(module.parameters(), 0.5)
            backward(module, 1)
            optimizer.step()

        return train

    assert_trains_as(
        make(device),
        train_with(torchembed.optim, clip_grad_norm_),
        train_with(torch.optim, torch.nn.utils.clip_grad_norm_),
    )


def test_accumulated_gradients_of_weighted_means(device: torch.device) -> None:
    # A row's gradients come from several backwards, each with its own scales.
    def rows_of(bag: Any, clip: Clip, optimizer: Any) -> Tensor:
        place = bag.weight.device
        for ids in ([[1, 1, 2]], [[2, 3, 3]]):
            bag(torch.tensor(ids, device=place)).square().sum().backward()
        clip([bag.weight], 0.25)
        optimizer.step()
        return bag.weight.detach()

    ours = torchembed.EmbeddingBag(5, 3, device=device, seed=0)
    initial = ours.weight.detach().clone()

    def formula(dtype: torch.dtype) -> Tensor:
        bag = nn.EmbeddingBag.from_pretrained(initial.cpu().to(dtype, copy=True), freeze=False)
        return rows_of(bag, torch.nn.utils.clip_grad_norm_, torch.optim.SGD([bag.weight], lr=1.0))

    assert_follows(rows_of(ours, clip_grad_norm_, SGD([ours.weight], lr=1.0)), formula)


def test_without_gradients_the_norm_is_zero(device: torch.device) -> None:
    module = make(device)
    assert clip_grad_norm_(module.parameters(), 1.0).item() == 0.0
    SGD(module.parameters(), lr=0.1)
    assert clip_grad_norm_(module.parameters(), 1.0).item() == 0.0
    module(batch(0).jagged(device)).values()
    assert clip_grad_norm_(module.parameters(), 1.0).item() == 0.0
    assert clip_grad_norm_([], 1.0).item() == 0.0


def test_a_bound_of_zero_clears(device: torch.device) -> None:
    module, before = make(device), make(device)
    optimizer = SGD(module.parameters(), lr=0.1)
    backward(module, 0)
    clip_grad_norm_(module.parameters(), 0.0)
    optimizer.step()
    assert_same_bits(weight(module, "a"), weight(before, "a"))


def test_one_parameter_may_be_given_alone(device: torch.device) -> None:
    parameter = nn.Parameter(torch.ones(4, device=device))
    parameter.grad = torch.full((4,), 3.0, device=device)
    assert clip_grad_norm_(parameter, 1.0).item() == 6.0


def test_errors() -> None:
    module = make("cpu")
    with pytest.raises(ValueError, match="max_norm must not be negative, got -1"):
        clip_grad_norm_(module.parameters(), -1.0)
    module._tables[1].is_sharded = True
    with pytest.raises(
        RuntimeError,
        match=r"table b is sharded, .* or let TrainPipeline\(max_grad_norm=\.\.\.\) clip",
    ):
        clip_grad_norm_(module.parameters(), 1.0)
