"""Gradients of dense parameters can be read after each step, captured or not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torchembed
from tests.support.tape import taped_captures
from tests.support.tiny_model import TinyModel, fixed_batches, make_optimizers, step_by_hand
from tests.support.tiny_training import LOSS
from torchembed.training import TrainPipeline

NUM_STEPS = 8


def joint(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torchembed.optim.Adagrad.with_dense(model.parameters(), lr=0.125)]


def gradients_of(model: TinyModel) -> list[Tensor | None]:
    grads = [parameter.grad for parameter in model.dense.parameters()]
    return [None if grad is None else grad.clone() for grad in grads]


@pytest.mark.parametrize("make", [joint, make_optimizers])
@pytest.mark.parametrize("clears", [False, True])
def test_gradients_are_those_of_the_step(
    make: Callable[[nn.Module], list[torch.optim.Optimizer]], clears: bool
) -> None:
    batches = fixed_batches(NUM_STEPS)
    by_hand, expected = TinyModel(is_deep=True), []
    optimizers = make(by_hand)
    for batch in batches:
        step_by_hand(by_hand, LOSS, optimizers, batch)
        expected.append(gradients_of(by_hand))
    model = TinyModel(is_deep=True)
    with (
        taped_captures(),
        TrainPipeline(model, LOSS, make(model), capture=True, self_check_every=2) as pipeline,
    ):
        iterator = iter(batches)
        for gradients in expected:
            pipeline.progress(iterator)
            found = gradients_of(model)
            assert all(grad is not None for grad in found)
            assert all(map(torch.equal, found, gradients))  # type: ignore[arg-type]
            if clears:
                model.zero_grad()
        assert pipeline.engine.is_captured
