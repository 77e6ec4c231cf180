"""Tensors read of a step's result stay as they are, whatever later steps write."""

import gc
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.tape import taped_captures
from tests.support.tiny_model import TinyModel, fixed_batches, make_batch, make_optimizers
from tests.support.tiny_training import LOSS
from torchembed.core.trees import tensors_in
from torchembed.data import Batch
from torchembed.step.stages import StepForm
from torchembed.training import TrainPipeline

NUM_STEPS = 10


@pytest.fixture(autouse=True)
def _taped() -> Iterator[None]:
    with taped_captures():
        yield


def pipeline_of(model: nn.Module) -> TrainPipeline:
    return TrainPipeline(model, LOSS, make_optimizers(model), capture=True)


def jagged_batches(count: int) -> list[Batch]:
    return [make_batch(8, seed) for seed in range(count)]


BATCHES = {StepForm.GRAPH: fixed_batches, StepForm.PADDED: jagged_batches}


@pytest.mark.parametrize("form", BATCHES)
def test_what_is_read_may_be_kept(form: StepForm) -> None:
    batches = BATCHES[form](NUM_STEPS)
    pipeline, iterator = pipeline_of(TinyModel(is_deep=True)), iter(batches)
    kept: list[tuple[Tensor, Tensor, Any]] = []
    copies: list[tuple[Tensor, Tensor]] = []
    kinds = set()
    for _ in batches:
        result = pipeline.progress(iterator)
        kinds.add(result.kind.form)
        kept.append((result.loss.detach(), result.output, result.batch))
        copies.append((result.peek_loss().clone(), result.output.clone()))
    assert form in kinds
    assert len({loss.item() for loss, _ in copies}) == NUM_STEPS
    for (loss, output, of_step), (loss_then, output_then), batch in zip(
        kept, copies, batches, strict=True
    ):
        assert torch.equal(loss, loss_then)
        assert torch.equal(output, output_then)
        for found, expected in zip(tensors_in(of_step), tensors_in(batch), strict=True):
            assert torch.equal(found, expected)


def test_a_result_that_is_held_keeps_its_loss() -> None:
    batches = fixed_batches(NUM_STEPS)
    pipeline, iterator = pipeline_of(TinyModel(is_deep=True)), iter(batches)
    losses, results = [], []
    for _ in batches:
        results.append(pipeline.progress(iterator))
        losses.append(results[-1].peek_loss().clone())
    assert [result.loss.item() for result in results] == [loss.item() for loss in losses]
    assert [result.num_samples for result in results] == [8] * NUM_STEPS


@pytest.mark.parametrize("name", ["output", "batch"])
def test_output_and_batch_are_refused_when_another_step_has_written_to_them(name: str) -> None:
    batches = fixed_batches(NUM_STEPS)
    pipeline, iterator = pipeline_of(TinyModel()), iter(batches)
    results = [pipeline.progress(iterator) for _ in batches]
    with pytest.raises(RuntimeError, match=rf"result\.{name} must be read before the next step"):
        getattr(results[-2], name)
    getattr(results[-1], name)


def test_results_of_several_layouts_know_of_each_others_steps() -> None:
    sizes = itertools.cycle((8, 4))
    batches = [fixed_batches(1, next(sizes))[0] for _ in range(24)]
    pipeline, iterator = pipeline_of(TinyModel()), iter(batches)
    results = [pipeline.progress(iterator) for _ in batches]
    assert [result.kind.form for result in results[-2:]] == [StepForm.GRAPH] * 2
    with pytest.raises(RuntimeError, match=r"result\.output must be read"):
        _ = results[-2].output


def test_results_of_eager_steps_are_their_own() -> None:
    batches = fixed_batches(4)
    model = TinyModel()
    pipeline, iterator = TrainPipeline(model, LOSS, make_optimizers(model)), iter(batches)
    results = [pipeline.progress(iterator) for _ in batches]
    assert results[0].output.shape == (8,)
    assert torch.equal(results[0].batch.labels, batches[0].labels)


def test_nobody_holds_a_result_for_the_caller() -> None:
    batches = fixed_batches(NUM_STEPS)
    pipeline, iterator = pipeline_of(TinyModel()), iter(batches)
    held = [weakref.ref(pipeline.progress(iterator)) for _ in batches]
    gc.collect()
    assert all(result() is None for result in held)
