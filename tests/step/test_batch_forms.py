"""Batches as people write them train in captured steps as in the plain loop, bit for bit."""

from typing import Any

from torch import Tensor, nn

import torchembed
from tests.support.tiny_model import TinyModel, fixed_batches, make_optimizers, step_by_hand
from tests.support.tiny_training import LOSS, assert_same_state, state_of
from torchembed.data import Batch
from torchembed.training import StepForm, TrainPipeline


class WithoutDense(TinyModel):
    """A model of ids alone."""

    def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
        assert dense.shape[1] == 0
        return self.tables(sparse).values().sum(dim=1, keepdim=True) + self.dense.bias


def test_batches_without_dense_columns_are_captured() -> None:
    batches = [Batch(batch.dense[:, :0], *batch[1:]) for batch in fixed_batches(7)]
    models = [WithoutDense() for _ in range(2)]
    for model in models:
        model.dense.weight.requires_grad_(False)
    optimizers = make_optimizers(models[0])
    losses = [step_by_hand(models[0], LOSS, optimizers, batch).item() for batch in batches]
    assert trained(models[1], LOSS, batches) == (losses, StepForm.GRAPH)
    assert_same_state(models[1], state_of(models[0]))


def trained(model: nn.Module, loss_fn: Any, batches: list[Any]) -> tuple[list[float], StepForm]:
    """The losses of the steps that a GPU captures, and the form of the last one."""
    with TrainPipeline(model, loss_fn, make_optimizers(model), capture=True) as pipeline:
        iterator = iter(batches)
        results = [pipeline.progress(iterator) for _ in batches]
        losses = [result.loss.item() for result in results]
    return losses, results[-1].kind.form
