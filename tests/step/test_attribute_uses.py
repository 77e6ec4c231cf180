"""Attributes of modules that steps read make graphs stale; others change as in a plain loop."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchembed
from tests.support.tape import taped_captures
from tests.support.tiny_model import TinyModel, fixed_batches, make_optimizers, step_by_hand
from tests.support.tiny_training import LOSS, assert_same_state, state_of
from torchembed.step.stages import StepForm
from torchembed.step.watches import attribute_uses
from torchembed.training import TrainPipeline

NUM_STEPS = 14
Loop = Callable[[Any, int], object]
"""The loop's doings with the model after each step, by its number; what it returns is compared."""


@pytest.fixture(autouse=True)
def _taped() -> Iterator[None]:
    with taped_captures():
        yield


class Deep(TinyModel):
    """Deep, with a hook of the class for vectors."""

    def __init__(self) -> None:
        super().__init__(is_deep=True)

    def change(self, vectors: Tensor) -> Tensor:
        return vectors

    def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
        vectors = self.change(self.tables(sparse).values())
        return self.dense(torch.cat([dense, vectors], dim=1))


def trained_alike(make: Callable[[], nn.Module], loop: Loop) -> tuple[TrainPipeline, list[str]]:
    """Train by hand and by a pipeline, and hold that both are equal; the pipeline, and the texts of
    its warnings."""
    batches = fixed_batches(NUM_STEPS)
    by_hand, expected = make(), list[Any]()
    optimizers = make_optimizers(by_hand)
    for number, batch in enumerate(batches):
        loss = step_by_hand(by_hand, LOSS, optimizers, batch)
        expected.append((loss, loop(by_hand, number)))
    model, found = make(), list[Any]()
    pipeline = TrainPipeline(model, LOSS, make_optimizers(model), capture=True)
    iterator = iter(batches)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(NUM_STEPS):
            loss = pipeline.progress(iterator).loss
            found.append((loss, loop(model, number)))
    # Only now: what the loop has kept must be as it was.
    for one, other in zip(found, expected, strict=True):
        assert str(one) == str(other)
        if isinstance(one[1], Tensor):
            assert torch.equal(one[1], other[1])
    assert_same_state(model, state_of(by_hand))
    return pipeline, [str(warning.message) for warning in caught]


class Leaves(Deep):
    """Leaves a tensor, a tree of tensors and a number in attributes, and a tensor in a buffer."""

    last: Tensor
    mean: Tensor
    num_samples: int

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def change(self, vectors: Tensor) -> Tensor:
        self.last, self.mean = vectors.detach().sum(), vectors.detach().mean(0)
        self.seen = {"vectors": [vectors], "none": None}
        self.num_samples = len(vectors)
        return vectors * self.mean


def test_what_forward_leaves_may_be_kept() -> None:
    def read(model: Any, number: int) -> object:
        assert model.num_samples == 8
        model.num_samples = number
        vectors: Tensor = model.seen["vectors"][0].detach()
        return torch.cat([vectors.flatten(), model.last.reshape(1), model.mean])

    pipeline, texts = trained_alike(Leaves, read)
    assert texts == []
    assert pipeline.num_captures == 2
    assert pipeline.engine.is_captured


def test_a_buffer_that_forward_counts_in_stays_in_its_memory() -> None:
    class CountsInPlace(Deep):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def change(self, vectors: Tensor) -> Tensor:
            self.count += 1
            return vectors / self.count

    pipeline, texts = trained_alike(CountsInPlace, lambda model, number: model.count.clone())
    assert texts == []
    assert pipeline.num_captures == 2
    assert pipeline.engine.is_captured


def test_what_only_the_loop_sets_may_change() -> None:
    def count(model: Any, number: int) -> None:
        model.global_step = number
        model.dense.position = number

    class Counted(Deep):
        global_step = 0

    pipeline, texts = trained_alike(Counted, count)
    assert texts == []
    assert pipeline.num_captures == 2


class ByGetattr(Deep):
    def change(self, vectors: Tensor) -> Tensor:
        return vectors * getattr(self, "_".join(("global", "step")), 1)


class ByDict(Deep):
    def change(self, vectors: Tensor) -> Tensor:
        return vectors * vars(self).get("global_step", 1)


class ByProperty(Deep):
    global_step = 1

    @property
    def factor(self) -> int:
        return self.global_step

    def change(self, vectors: Tensor) -> Tensor:
        return vectors * self.factor


class ByBuffers(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("global_step", torch.ones(()))

    def change(self, vectors: Tensor) -> Tensor:
        return vectors * next(tensor for _, tensor in self.named_buffers(recurse=False))


@pytest.mark.parametrize("kind", [ByGetattr, ByDict, ByProperty, ByBuffers])
def test_what_forward_reads_counts_however_it_does(kind: type[nn.Module]) -> None:
    def count(model: Any, number: int) -> None:
        is_tensor = isinstance(model.global_step, Tensor) if number else kind is ByBuffers
        model.global_step = torch.tensor(number / 4) if is_tensor else number / 4

    _, texts = trained_alike(kind, count)
    (text,) = texts
    assert f"global_step of model {kind.__name__}: it changes from step to step" in text


def test_a_branch_that_reads_more_later_is_followed() -> None:
    class Branching(Deep):
        is_late, factor = False, 0.5

        def change(self, vectors: Tensor) -> Tensor:
            return vectors * self.factor if self.is_late else vectors

    def change(model: Any, number: int) -> None:
        model.is_late = number >= 6
        model.factor = 0.5 if number < 12 else 0.25

    pipeline, texts = trained_alike(Branching, change)
    assert texts == []
    assert pipeline.num_captures == 4


def test_what_cannot_be_copied_is_trained_eagerly_and_named() -> None:
    class Meter:
        value = 0.0

    class Opaque(Deep):
        def change(self, vectors: Tensor) -> Tensor:
            self.meter = Meter()
            return vectors

    pipeline, texts = trained_alike(Opaque, lambda model, number: None)
    (text,) = texts
    assert "meter of model Opaque: forward sets it, which no graph does" in text
    assert pipeline.engine is not pipeline.engines[0]


def test_all_attributes_count_where_torch_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attribute_uses, "_has_compiled", lambda: True)

    def count(model: Any, number: int) -> None:
        model.global_step = number

    pipeline, texts = trained_alike(Deep, count)
    (text,) = texts
    assert "global_step of model Deep: it changes from step to step" in text
    assert {kind.form for kind in pipeline.kinds} == {StepForm.EAGER}


def test_classes_are_as_they_were() -> None:
    class Own(Deep):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)

    before = vars(Own)["__setattr__"]
    trained_alike(Own, lambda model, number: None)
    assert vars(Own)["__setattr__"] is before
    assert "__getattribute__" not in vars(Own)
    trained_alike(Deep, lambda model, number: None)
    assert not {"__getattribute__", "__setattr__"} & vars(Deep).keys()
