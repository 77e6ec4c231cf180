"""A step that fails, or whose numbers are not finite, leaves what it leaves in a loop by hand."""

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import torchembed
from tests.support.tape import taped_captures
from tests.support.tiny_model import (
    KEYS,
    TinyModel,
    fixed_batches,
    make_batch,
    make_optimizers,
    step_by_hand,
)
from tests.support.tiny_training import LOSS, state_of
from torchembed.data import Batch
from torchembed.training import TrainPipeline

NUM_STEPS = 18
Optimizers = Sequence[torch.optim.Optimizer]
Prepare = Callable[[TinyModel, Optimizers], Callable[[int], object]]
"""Prepares a model and its optimizers; returns what is called before each step."""


@pytest.fixture(autouse=True)
def _taped() -> Iterator[None]:
    with taped_captures():
        yield


class Stops(Exception):  # noqa: N818 - as users name theirs
    """Raised by code of a user."""


def stop(*_: object) -> None:
    raise Stops("not this one")


def outcomes(train: Callable[[int], Tensor], before: Callable[[int], object]) -> list[str]:
    """The loss of each step, or the error that it raises; the loop goes on after one."""
    found = []
    for number in range(NUM_STEPS):
        before(number)
        try:
            found.append(str(train(number).item()))
        except (Stops, KeyError, ValueError, IndexError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def trained_alike(prepare: Prepare, batches: Sequence[Batch]) -> tuple[list[str], TrainPipeline]:
    """Train by hand and by a pipeline, hold that both are equal, and return the outcomes."""
    by_hand = TinyModel(is_deep=True)
    optimizers = make_optimizers(by_hand)
    expected = outcomes(
        lambda number: step_by_hand(by_hand, LOSS, optimizers, batches[number]),
        prepare(by_hand, optimizers),
    )
    model, iterator = TinyModel(is_deep=True), iter(batches)
    of_pipeline = make_optimizers(model)
    pipeline = TrainPipeline(model, LOSS, of_pipeline, capture=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = outcomes(lambda _: pipeline.progress(iterator).loss, prepare(model, of_pipeline))
    assert found == expected
    state = state_of(by_hand)
    for name, tensor in state_of(model).items():
        torch.testing.assert_close(tensor, state[name], rtol=0, atol=0, equal_nan=True)
    return found, pipeline


def for_one_step(first: int, register: Callable[[], Any]) -> Callable[[int], object]:
    """Before each step: a hook is there for step ``first`` alone."""
    handles: list[Any] = []

    def before(number: int) -> None:
        if number == first:
            handles.append(register())
        elif handles:
            handles.pop().remove()

    return before


HOOKS: dict[str, Callable[[TinyModel, Optimizers], Any]] = {
    "forward hook": lambda model, _: model.dense.register_forward_hook(stop),
    "forward hook of the tables": lambda model, _: model.tables.register_forward_hook(stop),
    "backward hook": lambda model, _: model.dense.register_full_backward_hook(stop),
    "gradient hook": lambda model, _: next(model.dense.parameters()).register_hook(stop),
    "hook before the tables' step": lambda _, o: o[0].register_step_pre_hook(stop),
    "hook after the tables' step": lambda _, o: o[0].register_step_post_hook(stop),
    "hook before the other step": lambda _, o: o[1].register_step_pre_hook(stop),
    "hook after the other step": lambda _, o: o[1].register_step_post_hook(stop),
}


@pytest.mark.parametrize("first", [1, 8])
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_that_raises(name: str, first: int) -> None:
    found, pipeline = trained_alike(
        lambda model, optimizers: for_one_step(first, lambda: HOOKS[name](model, optimizers)),
        fixed_batches(NUM_STEPS),
    )
    assert [number for number, text in enumerate(found) if "not this one" in text] == [first]
    assert pipeline.engine.is_captured


def nothing(*_: object) -> Callable[[int], object]:
    return lambda number: None


def dense_of(batch: Batch) -> Tensor:
    assert batch.dense is not None
    return batch.dense


def with_nan(batch: Batch) -> Batch:
    dense = dense_of(batch).clone()
    dense[0, 0] = float("nan")
    return batch._replace(dense=dense)


def without_a_feature(batch: Batch) -> Batch:
    sparse = torchembed.SparseFeatures(
        keys=KEYS[:1], values=batch.sparse.values[:16], batch_size=8, hotness=(2,)
    )
    return batch._replace(sparse=sparse)


def with_another_width(batch: Batch) -> Batch:
    return batch._replace(dense=dense_of(batch).repeat(1, 2))


def jagged(batch: Batch) -> Batch:
    del batch
    return make_batch(8, 3)


def smaller(batch: Batch) -> Batch:
    del batch
    return fixed_batches(1, 3)[0]


def in_float64(batch: Batch) -> Batch:
    return batch._replace(dense=dense_of(batch).double())


ODD: dict[str, tuple[Callable[[Batch], Batch], bool]] = {
    "NaN": (with_nan, False),
    "a feature less": (without_a_feature, True),
    "more dense columns": (with_another_width, True),
    "another dtype": (in_float64, True),
    "jagged": (jagged, False),
    "smaller": (smaller, False),
}
"""How a batch is odd, and whether the model raises for it."""


@pytest.mark.parametrize(("name", "odd"), [*itertools.product(ODD, (1, 4, 9))])
def test_an_odd_batch(name: str, odd: int) -> None:
    make, raises = ODD[name]
    batches = fixed_batches(NUM_STEPS)
    batches[odd] = make(batches[odd])
    found, pipeline = trained_alike(nothing, batches)
    assert ("Error" in found[odd]) is raises
    assert sum("Error" in text for text in found) == raises
    assert pipeline.engine.is_captured
