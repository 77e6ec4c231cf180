"""Random numbers of the host train in a pipeline as in a loop by hand, and failed captures leave
the host as it was."""

import random
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchembed
from tests.support.tape import taped_captures
from tests.support.tiny_model import TinyModel, fixed_batches, make_optimizers, step_by_hand
from tests.support.tiny_training import LOSS, assert_same_state, state_of
from torchembed.step.engines.collective_capture import failure_on_any_rank
from torchembed.step.watches.host_state import HostState
from torchembed.training import TrainPipeline

NUM_STEPS = 8


class Draws(TinyModel):
    """Scales its vectors by a random number of the host."""

    def __init__(self, draw: Callable[["Draws"], float]) -> None:
        super().__init__(is_deep=True)
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002 - what models use
        self.draw = draw
        self.of_python, self.of_numpy = random.Random(3), np.random.default_rng(3)
        self.of_torch = torch.Generator().manual_seed(3)

    def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
        vectors = self.tables(sparse).values() * self.draw(self)
        return self.dense(torch.cat([dense, vectors], dim=1))


CASES: dict[str, Callable[[Draws], float]] = {
    "Python's random": lambda _: random.random(),
    "NumPy's generator": lambda _: float(np.random.rand()),  # noqa: NPY002 - as above
    "of_python of model Draws": lambda model: model.of_python.gauss(1, 0.1),
    "of_numpy of model Draws": lambda model: float(model.of_numpy.standard_normal()),
    "of_torch of model Draws": lambda model: torch.rand((), generator=model.of_torch).item(),
}


@pytest.mark.parametrize("name", CASES)
def test_random_numbers_of_the_host_are_drawn_in_every_step(name: str) -> None:
    batches = fixed_batches(NUM_STEPS)
    by_hand = Draws(CASES[name])
    optimizers = make_optimizers(by_hand)
    losses = [step_by_hand(by_hand, LOSS, optimizers, batch).item() for batch in batches]
    model = Draws(CASES[name])
    with (
        taped_captures(),
        warnings.catch_warnings(record=True) as caught,
        TrainPipeline(model, LOSS, make_optimizers(model), capture=True) as pipeline,
    ):
        warnings.simplefilter("always")
        iterator = iter(batches)
        assert [pipeline.progress(iterator).loss.item() for _ in batches] == losses
        assert pipeline.num_captures == 0
    assert_same_state(model, state_of(by_hand))
    (text,) = [str(warning.message) for warning in caught]
    assert text == (
        "the train step could not be captured as a CUDA graph, so it runs eagerly from now on: "
        f"{name}: forward draws from it, which no graph repeats; draw on the device"
    )


GENERATOR = np.random.default_rng(0)

Loss = Callable[[Tensor, Tensor], Tensor]


def of_a_closure() -> Loss:
    generator = random.Random(0)
    return lambda logits, labels: LOSS(logits, labels) * generator.uniform(0.5, 1.5)


def of_a_global_variable() -> Loss:
    GENERATOR.bit_generator.state = np.random.default_rng(0).bit_generator.state
    return lambda logits, labels: LOSS(logits, labels) * float(GENERATOR.uniform(0.5, 1.5))


def of_python() -> Loss:
    random.seed(0)
    return lambda logits, labels: LOSS(logits, labels) * random.uniform(0.5, 1.5)


class Smoothing:
    """A loss function with a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return LOSS(logits, labels) * torch.rand((), generator=self.generator).item()


OF_LOSSES: dict[Callable[[], Loss], str] = {
    of_a_closure: "generator of the closure of of_a_closure.<locals>.<lambda>",
    of_a_global_variable: "GENERATOR of the globals of tests.step.test_host_state",
    of_python: "Python's random",
    Smoothing: "generator of loss function Smoothing",
}


@pytest.mark.parametrize("make", OF_LOSSES)
def test_random_numbers_that_a_loss_function_draws(make: Callable[[], Loss]) -> None:
    batches, by_hand, loss_fn = fixed_batches(NUM_STEPS), TinyModel(is_deep=True), make()
    optimizers = make_optimizers(by_hand)
    losses = [step_by_hand(by_hand, loss_fn, optimizers, batch).item() for batch in batches]
    model, loss_fn = TinyModel(is_deep=True), make()
    pipeline = TrainPipeline(model, loss_fn, make_optimizers(model), capture=True)
    iterator = iter(batches)
    with taped_captures(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [pipeline.progress(iterator).loss.item() for _ in batches] == losses
    assert_same_state(model, state_of(by_hand))
    (text,) = [str(warning.message) for warning in caught]
    assert f": {OF_LOSSES[make]}: forward draws from it" in text


def test_torchs_generator_of_the_cpu_is_that_of_the_device_on_a_cpu() -> None:
    for device, is_drawn in (("cpu", False), ("cuda", True)):
        state = HostState(nn.Linear(2, 2), torch.device(device))
        for _ in range(3):
            with state.observed():
                torch.rand(2)
        assert (state.drawn is not None) == is_drawn
    assert str(state.drawn).startswith("torch's generator of the CPU: forward draws from it")


def test_what_only_the_first_step_draws_is_captured() -> None:
    state = HostState(nn.Linear(2, 2), torch.device("cpu"))
    for number in range(3):
        with state.observed():
            if number == 0:
                random.random()
    assert state.drawn is None


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.items, self.seen = 0, [1, 2], {"a": 1}
        self.generator = np.random.default_rng(3)
        self.register_buffer("mean", torch.zeros(2))


def test_a_capture_that_fails_leaves_the_host_as_it_was() -> None:
    model = Holder()
    mean, items, seen = model.mean, model.items, model.seen

    def numbers() -> list[object]:
        of_torch = torch.rand(3).tolist()
        of_all = np.random.mtrand._rand
        of_numpy = of_all.standard_normal(), model.generator.random()
        return [random.random(), of_torch, *of_numpy]

    def capture() -> None:
        model.count += 1
        model.items.append(3)
        model.seen = {"b": 2}
        seen["c"] = 3
        model.added = 1
        model.mean = torch.ones(2)
        drawn.append(numbers())
        raise RuntimeError("nothing can be captured")

    drawn: list[list[object]] = []
    state = HostState(model, torch.device("cpu"))
    with pytest.warns(UserWarning, match="eagerly from now on: RuntimeError: nothing can be"):
        failure_on_any_rank(capture, state)
    assert drawn == [numbers()]
    assert (model.count, model.items, model.seen) == (0, [1, 2], {"a": 1})
    assert model.items is items
    assert model.seen is seen
    assert model.mean is mean
    assert not hasattr(model, "added")


def test_a_capture_that_succeeds_changes_nothing_back() -> None:
    model = Holder()
    state = HostState(model, torch.device("cpu"))

    def capture() -> None:
        model.count += 1

    assert failure_on_any_rank(capture, state) is None
    assert model.count == 1


def test_what_a_model_changes_is_put_back_also_after_an_error() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(2))
            self.seen, self.generator = [0], random.Random(0)

        def forward(self) -> None:
            self.get_buffer("count").add_(1)
            self.seen += [1]
            self.last = self.generator.random(), random.random(), torch.rand(1)
            raise ValueError("a model of the caller")

    model = Changing()
    buffer, numbers = model.get_buffer("count"), (model.generator.getstate(), random.getstate())
    of_torch = torch.random.get_rng_state()
    state = HostState(model, torch.device("cpu"))
    with pytest.raises(ValueError, match="of the caller"), state.unchanged():
        model()
    assert model.get_buffer("count") is buffer
    assert buffer.tolist() == [0, 0]
    assert model.seen == [0]
    assert not hasattr(model, "last")
    assert (model.generator.getstate(), random.getstate()) == numbers
    assert torch.equal(torch.random.get_rng_state(), of_torch)
