"""Values that no module holds, and that forward or the loss function reads, train in a pipeline as
in a loop by hand."""

import functools
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import torchembed
from tests.support.tape import taped_captures
from tests.support.tiny_model import TinyModel, fixed_batches, make_optimizers, step_by_hand
from tests.support.tiny_training import LOSS, assert_same_state, state_of
from torchembed.training import StepForm, TrainPipeline

NUM_STEPS = 18
FACTOR = 1.0


@pytest.fixture(autouse=True)
def _taped() -> Iterator[None]:
    with taped_captures():
        yield


class Run(NamedTuple):
    """A model with its loss function, and what sets the factor that one of them reads."""

    model: nn.Module
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    set_factor: Callable[[float], None]


class LossModule(nn.Module):
    pos_weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0
        self.register_buffer("pos_weight", torch.ones(()))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return LOSS(logits, labels, pos_weight=self.pos_weight) * self.factor


def attribute_of_loss() -> Run:
    loss_fn = LossModule()
    return Run(TinyModel(), loss_fn, functools.partial(setattr, loss_fn, "factor"))


def buffer_of_loss() -> Run:
    loss_fn = LossModule()

    def set_factor(factor: float) -> None:
        if loss_fn.pos_weight != factor:
            loss_fn.pos_weight = torch.tensor(factor)

    return Run(TinyModel(), functools.partial(loss_fn), set_factor)


class Trainer:
    """Counts its steps, which its loss does not read."""

    def __init__(self) -> None:
        self.num_steps, self.factor = 0, 1.0

    @property
    def scale(self) -> float:
        return self.factor

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return LOSS(logits, labels) * self.scale


def attribute_of_a_trainer() -> Run:
    trainer = Trainer()

    def set_factor(factor: float) -> None:
        trainer.num_steps += 1
        trainer.factor = factor

    return Run(TinyModel(), trainer.loss, set_factor)


def closure() -> Run:
    factor = 1.0

    def set_factor(value: float) -> None:
        nonlocal factor
        factor = value

    return Run(TinyModel(), lambda logits, labels: LOSS(logits, labels) * factor, set_factor)


def scaled(loss: Tensor) -> Tensor:
    return loss * FACTOR


def global_variable() -> Run:
    def set_factor(factor: float) -> None:
        global FACTOR  # noqa: PLW0603 - as scripts do
        FACTOR = factor

    set_factor(1.0)
    return Run(TinyModel(), lambda logits, labels: scaled(LOSS(logits, labels)), set_factor)


def default_value() -> Run:
    settings = types.SimpleNamespace(factor=1.0)

    def loss_fn(logits: Tensor, labels: Tensor, state: Any = settings) -> Tensor:
        return LOSS(logits, labels) * state.factor

    return Run(TinyModel(), loss_fn, functools.partial(setattr, settings, "factor"))


def keyword_of_a_partial() -> Run:
    def loss_fn(logits: Tensor, labels: Tensor, factors: dict[str, float]) -> Tensor:
        return LOSS(logits, labels) * factors["loss"]

    factors = {"loss": 1.0}
    partial = functools.partial(loss_fn, factors=factors)
    return Run(TinyModel(), partial, functools.partial(factors.__setitem__, "loss"))


def attribute_of_a_function() -> Run:
    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return LOSS(logits, labels) * loss_fn.factors[0]  # type: ignore[attr-defined]

    def set_factor(factor: float) -> None:
        loss_fn.factors = (factor, 1.0)  # type: ignore[attr-defined]

    set_factor(1.0)
    return Run(TinyModel(), loss_fn, set_factor)


class Configured(TinyModel):
    """Reads a namespace, a dict in a dict, and an attribute of its class."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(factor=1.0)
        self.options = {"loss": {"factor": 1.0}}

    def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
        logits = super().forward(dense, sparse)
        return logits * self.config.factor * self.options["loss"]["factor"] * self.scale


def namespace() -> Run:
    model = Configured()
    return Run(model, LOSS, functools.partial(setattr, model.config, "factor"))


def dict_in_a_dict() -> Run:
    model = Configured()
    return Run(model, LOSS, functools.partial(model.options["loss"].__setitem__, "factor"))


def attribute_of_a_class() -> Run:
    Configured.scale = 1.0
    return Run(Configured(), LOSS, functools.partial(setattr, Configured, "scale"))


def of_an_object_that_forward_changes() -> Run:
    class Mean:
        def __init__(self) -> None:
            self.value = torch.zeros(())

        def update(self, logits: Tensor) -> None:
            self.value = 0.5 * self.value + logits.detach().mean()

    class Metered(TinyModel):
        def __init__(self) -> None:
            super().__init__()
            self.mean = Mean()

        def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
            logits = super().forward(dense, sparse)
            self.mean.update(logits)
            return logits - self.mean.value

    return Run(Metered(), LOSS, lambda factor: None)


def trained_alike(make: Callable[[], Run], factors: list[float]) -> tuple[TrainPipeline, list[str]]:
    """Train by hand and by a pipeline with a factor for each step, and hold that both are equal;
    the pipeline, and the texts of its warnings."""
    batches = fixed_batches(NUM_STEPS)
    by_hand, losses = make(), []
    optimizers = make_optimizers(by_hand.model)
    for factor, batch in zip(factors, batches, strict=True):
        by_hand.set_factor(factor)
        losses.append(step_by_hand(by_hand.model, by_hand.loss_fn, optimizers, batch).item())
    run, found = make(), []
    pipeline = TrainPipeline(run.model, run.loss_fn, make_optimizers(run.model), capture=True)
    iterator = iter(batches)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for factor in factors:
            run.set_factor(factor)
            found.append(pipeline.progress(iterator).loss.item())
    assert found == losses
    assert_same_state(run.model, state_of(by_hand.model))
    return pipeline, [str(warning.message) for warning in caught]


PLACES: dict[Callable[[], Run], str] = {
    attribute_of_loss: "factor of loss function LossModule",
    buffer_of_loss: "pos_weight of loss function LossModule",
    attribute_of_a_trainer: "factor of Trainer of the loss function",
    closure: "factor of the closure of closure.<locals>.<lambda>",
    global_variable: "FACTOR of the globals of tests.step.test_read_values",
    default_value: "factor of state of the defaults of default_value.<locals>.loss_fn",
    keyword_of_a_partial: "contents of factors of the keywords of loss function function",
    attribute_of_a_function: "factors of function attribute_of_a_function.<locals>.loss_fn",
    namespace: "factor of config of model Configured",
    dict_in_a_dict: "contents of loss of options of model Configured",
    attribute_of_a_class: "scale of class Configured",
}


@pytest.mark.parametrize("make", PLACES)
def test_a_value_that_is_replaced_once_is_captured_anew(make: Callable[[], Run]) -> None:
    pipeline, texts = trained_alike(make, [1.0] * 8 + [0.5] * (NUM_STEPS - 8))
    assert texts == []
    assert pipeline.num_captures == 4
    assert {kind.form for kind in pipeline.kinds} == {StepForm.GRAPH, StepForm.EAGER}


@pytest.mark.parametrize("make", PLACES)
def test_a_value_that_changes_at_each_step_trains_eagerly(make: Callable[[], Run]) -> None:
    _, texts = trained_alike(make, [1.0 / (number + 1) for number in range(NUM_STEPS)])
    (text,) = texts
    assert text.startswith("the train step could not be captured as a CUDA graph")
    assert f": {PLACES[make]}: it changes from step to step" in text


def test_an_object_that_forward_changes_trains_eagerly() -> None:
    _, texts = trained_alike(of_an_object_that_forward_changes, [1.0] * NUM_STEPS)
    (text,) = texts
    assert "value of mean of model Metered: it changes from step to step" in text


def test_what_no_code_reads_may_change() -> None:
    def make() -> Run:
        run = attribute_of_a_trainer()

        def count(factor: Any) -> None:
            run.set_factor(1.0)

        return run._replace(set_factor=count)

    pipeline, texts = trained_alike(make, [1.0] * NUM_STEPS)
    assert texts == []
    assert pipeline.num_captures == 2


def test_scripted_layers_are_captured() -> None:
    class Scripted(TinyModel):
        def __init__(self) -> None:
            super().__init__()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                self.dense = torch.jit.script(self.dense)

    pipeline, texts = trained_alike(
        lambda: Run(Scripted(), LOSS, lambda factor: None), [1.0] * NUM_STEPS
    )
    assert texts == []
    assert pipeline.num_captures == 2
