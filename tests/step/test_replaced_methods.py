"""Methods that others put in place of modules' and optimizers' own are called at every step."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import torchembed
from tests.support.tape import taped_captures
from tests.support.tiny_model import TinyModel, fixed_batches, make_optimizers, step_by_hand
from tests.support.tiny_training import LOSS, assert_same_state, state_of
from torchembed.step.stages import StepForm
from torchembed.step.watches.replaced_methods import ReplacedMethods
from torchembed.tables import table_of
from torchembed.training import TrainPipeline

NUM_STEPS = 22
Optimizers = Sequence[torch.optim.Optimizer]
Owner = Callable[[Any, Optimizers], Any]
"""Chooses what a method belongs to: of a model and its optimizers."""

OF_A_CLASS = "forward of a class"
CASES: dict[str, tuple[Owner, str, str]] = {
    "forward": (
        lambda model, _: model.dense[0],
        "forward",
        "assigned to forward of module dense.0",
    ),
    "forward of the model": (
        lambda model, _: model,
        "forward",
        "assigned to forward of model TinyModel",
    ),
    "forward of a class of torch": (lambda *_: nn.ReLU, "forward", "in place of ReLU.forward"),
    OF_A_CLASS: (
        lambda model, _: type(model),
        "forward",
        "in place of TinyModel.forward",
    ),
    "zero_grad": (lambda _, optimizers: optimizers[1], "zero_grad", "zero_grad of optimizer Adam"),
    "step of tables": (lambda _, optimizers: optimizers[0], "step", "step of optimizer Adagrad"),
}


def noting(method: Callable[..., Any], note: Callable[[], object]) -> Callable[..., Any]:
    """``method`` with a note of each call."""

    def noted(*arguments: Any) -> Any:
        note()
        return method(*arguments)

    return noted


@contextlib.contextmanager
def replaced_from(
    first: int, owner: Any, name: str, calls: list[int]
) -> Iterator[Callable[[int], None]]:
    """A function to call before each step: the method notes its calls from step ``first`` on, for
    four steps."""
    own, is_class = getattr(owner, name), isinstance(owner, type)

    def put_back() -> None:
        if is_class:
            setattr(owner, name, own)
        else:
            vars(owner).pop(name, None)

    def before(number: int) -> None:
        if number == first:
            setattr(owner, name, noting(own, lambda: calls.append(1)))
        if number == first + 4:
            put_back()

    try:
        yield before
    finally:
        put_back()


# A class that had another forward before the pipeline was made is taken as it was written.
@pytest.mark.parametrize(
    ("name", "first"),
    [(n, first) for n in CASES for first in (0, 8) if (n, first) != (OF_A_CLASS, 0)],
)
def test_a_replaced_method_is_called_at_every_step(name: str, first: int) -> None:
    choose, method, text = CASES[name]
    batches = fixed_batches(NUM_STEPS)
    by_hand, expected = TinyModel(is_deep=True), list[int]()
    optimizers = make_optimizers(by_hand)
    losses = []
    with replaced_from(first, choose(by_hand, optimizers), method, expected) as before:
        for number, batch in enumerate(batches):
            before(number)
            losses.append(step_by_hand(by_hand, LOSS, optimizers, batch).item())
    model, calls, texts = TinyModel(is_deep=True), list[int](), list[str]()
    optimizers = make_optimizers(model)
    pipeline, iterator = TrainPipeline(model, LOSS, optimizers, capture=True), iter(batches)
    owner = choose(model, optimizers)
    with taped_captures(), replaced_from(first, owner, method, calls) as before:
        for number in range(NUM_STEPS):
            before(number)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                result = pipeline.progress(iterator)
            texts += [str(warning.message) for warning in warned]
            assert result.loss.item() == losses[number]
            if first <= number < first + 4:
                assert result.kind.form is StepForm.EAGER
    assert pipeline.engine.is_captured  # again, once the method is back
    assert len(calls) == len(expected) >= 4
    assert_same_state(model, state_of(by_hand))
    says = "no CUDA graph can call replaced methods, so train steps run eagerly until these are"
    assert texts == [f"{says} removed: noting.<locals>.noted ({text})"]


def test_methods_of_libraries_are_none_of_others() -> None:
    model = TinyModel(is_deep=True)
    layers = model.dense
    assert isinstance(layers, nn.Sequential)
    layers[0].forward = torch.compile(layers[0].forward, backend="eager")
    layers[2] = torch.fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    optimizers = make_optimizers(model)
    StepLR(optimizers[0], 1)
    StepLR(optimizers[1], 1)
    assert not list(ReplacedMethods(model, optimizers).find())


class Scheduled(torchembed.optim.DenseAdagrad):
    """Adds no method that a step calls."""

    def describe(self) -> str:
        return "scheduled"


class Counting(Scheduled):
    """Counts its steps."""

    num_steps = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        self.num_steps += 1
        return super().step(closure)


@pytest.mark.parametrize("kind", [Scheduled, Counting])
def test_an_optimizer_that_overrides_its_step_is_called(kind: type[Scheduled]) -> None:
    model = TinyModel(is_deep=True)
    tables = [p for p in model.parameters() if table_of(p) is not None]
    dense = [p for p in model.parameters() if table_of(p) is None]
    optimizer = kind(dense, lr=0.1)
    optimizers = [torchembed.optim.Adagrad(tables, lr=0.1), optimizer]
    found = [str(method) for method in ReplacedMethods(model, optimizers).find()]
    assert found == ([] if kind is Scheduled else ["Counting.step (step of optimizer Counting)"])
    if kind is Counting:
        pipeline = TrainPipeline(model, LOSS, optimizers, capture=True)
        iterator = iter(fixed_batches(6))
        with taped_captures(), pytest.warns(UserWarning, match=r"Counting\.step"):
            kinds = [pipeline.progress(iterator).kind.form for _ in range(6)]
        assert set(kinds) == {StepForm.EAGER}
        assert isinstance(optimizer, Counting)
        assert optimizer.num_steps == 6
