"""Loss functions that are modules, with parameters, buffers and hooks of their own, train as in a
loop by hand."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.tape import taped_captures
from tests.support.tiny_model import TinyModel, fixed_batches
from tests.support.tiny_training import LOSS, assert_same_state, state_of
from torchembed.training import BatchLoss, StepForm, TrainPipeline

NUM_STEPS = 12
Optimizers = Sequence[torch.optim.Optimizer]


class Scaled(nn.Module):
    """A loss of scaled logits, whose scale is trained, with a mean of losses so far."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        # In no optimizer: its gradients add up.
        self.factor = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, output: Tensor, labels: Tensor) -> Tensor:
        loss = LOSS(output * self.scale * self.factor, labels)
        with torch.no_grad():
            self.mean.mul_(0.5).add_(loss.detach(), alpha=0.5)
        return loss

    def of_batch(self, output: Tensor, batch: Any) -> Tensor:
        return self(output, batch[1])


class Inputs(TinyModel):
    """Takes dense and sparse features as one argument."""

    def forward(self, inputs: Any) -> Tensor:  # type: ignore[override]
        found = inputs[0] if isinstance(inputs[0], tuple) else inputs
        return super().forward(*found).squeeze(1)


def joint(parameters: list[Tensor]) -> Optimizers:
    return [torchembed.optim.Adagrad.with_dense(parameters, lr=0.125)]


def apart(parameters: list[Tensor]) -> Optimizers:
    tables, dense = torchembed.optim.split_parameters(parameters)
    return [torchembed.optim.Adagrad(tables, lr=0.125), torch.optim.Adam(dense, lr=0.125)]


def trained(
    make: Callable[[list[Tensor]], Optimizers],
    *,
    given: Callable[[Scaled], Any] = lambda loss: loss,
    change: Callable[[Scaled, int], object] = lambda loss, number: None,
    max_grad_norm: float | None = None,
) -> tuple[TrainPipeline, list[str], list[StepForm]]:
    """Train by hand and by a pipeline with ``change`` before each step, and hold that both are
    equal; the pipeline, the texts of its warnings, and how steps ran."""
    batches = [((b.dense, b.sparse), b.labels) for b in fixed_batches(NUM_STEPS)]
    models, losses = [Inputs() for _ in range(2)], [Scaled() for _ in range(2)]
    parameters: list[list[Tensor]] = [
        [*m.parameters(), s.scale] for m, s in zip(models, losses, strict=True)
    ]
    by_hand, pipelined = map(make, parameters)
    expected, found, forms = list[float](), list[float](), list[StepForm]()
    for number, (inputs, labels) in enumerate(batches):
        change(losses[0], number)
        for optimizer in by_hand:
            optimizer.zero_grad()
        loss = losses[0](models[0](inputs), labels)
        loss.backward()
        if max_grad_norm is not None:
            torchembed.optim.clip_grad_norm_(parameters[0], max_grad_norm)
        for optimizer in by_hand:
            optimizer.step()
        expected.append(loss.item())
    iterator = iter(batches)
    with (
        taped_captures(),
        warnings.catch_warnings(record=True) as caught,
        TrainPipeline(
            models[1], given(losses[1]), pipelined, capture=True, max_grad_norm=max_grad_norm
        ) as pipeline,
    ):
        warnings.simplefilter("always")
        for number in range(NUM_STEPS):
            change(losses[1], number)
            result = pipeline.progress(iterator)
            found.append(result.loss.item())
            forms.append(result.kind.form)
    assert found == expected
    assert losses[0].scale.item() != 2.0
    for modules in (models, losses):
        assert_same_state(modules[1], state_of(modules[0]))
    return pipeline, [str(warning.message) for warning in caught], forms


GIVEN: dict[str, Callable[[Scaled], Any]] = {
    "a module": lambda loss: loss,
    "its method": lambda loss: loss.forward,
    "of the batch": lambda loss: BatchLoss(loss.of_batch),
}


@pytest.mark.parametrize("make", [joint, apart])
@pytest.mark.parametrize("given", GIVEN)
def test_parameters_of_a_loss_function_train(
    given: str, make: Callable[[list[Tensor]], Optimizers]
) -> None:
    pipeline, texts, forms = trained(make, given=GIVEN[given])
    assert texts == []
    assert forms[-1] is StepForm.GRAPH
    assert pipeline.num_captures == 2


def test_gradients_of_a_loss_function_count_in_the_norm() -> None:
    *_, texts, forms = trained(apart, max_grad_norm=0.125)
    assert (texts, forms[-1]) == ([], StepForm.GRAPH)


def test_a_loss_function_that_is_frozen_is_captured_anew() -> None:
    pipeline, texts, _ = trained(
        joint, change=lambda loss, number: loss.scale.requires_grad_(number < 6)
    )
    assert (texts, pipeline.num_captures) == ([], 4)


def test_hooks_on_a_loss_function_are_called() -> None:
    calls = list[str]()

    def halve(gradient: Tensor) -> Tensor:
        calls.append("gradient")
        return gradient / 2

    def register(loss: Scaled, number: int) -> None:
        if number == 0:
            loss.scale.register_hook(halve)
            loss.register_forward_hook(lambda *_: calls.append("forward"))

    _, (text,), forms = trained(joint, change=register)
    assert "forward hook of loss function Scaled" in text
    assert "gradient hook of parameter scale of the loss function" in text
    assert set(forms) == {StepForm.EAGER}
    assert calls == ["forward", "gradient"] * NUM_STEPS * 2


def test_tables_of_a_loss_function_are_refused() -> None:
    model, loss = TinyModel(), Scaled()
    loss.bias = torchembed.Embedding(5, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()])
    with pytest.raises(ValueError, match="let the model hold a loss function that trains tables"):
        TrainPipeline(model, loss, [optimizer])


def refused_on_ranks() -> str:
    model, loss = TinyModel(), Scaled()
    optimizers = apart([*model.parameters(), *loss.parameters()])
    try:
        TrainPipeline(model, loss, optimizers, device="cpu")
    except ValueError as error:
        return str(error)
    return ""


def test_parameters_of_a_loss_function_are_refused_on_several_ranks() -> None:
    for text in run_on_ranks(2, refused_on_ranks):
        assert "before it is sharded over ranks" in text
