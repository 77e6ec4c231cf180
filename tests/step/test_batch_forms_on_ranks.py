"""Ranks with different numbers of batches: empty ones of their form, or an error on every rank."""

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import TinyModel, fixed_batches, make_optimizers
from torchembed.training import BatchLoss, TrainPipeline, train


class WithoutDense(TinyModel):
    def forward(self, dense: Tensor | None, sparse: torchembed.SparseFeatures) -> Tensor:
        assert dense is None
        one = torch.ones(sparse.batch_size, 2)
        return self.dense(one) + self.tables(sparse).values().sum(dim=1, keepdim=True)


def sharded(model: nn.Module) -> nn.Module:
    torchembed.shard_embeddings(model, init_device_mesh("cpu", (2,)))
    return model


def weighted_loss(output: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return (F.mse_loss(output, labels[:, None].float(), reduction="none")[:, 0] * weights).mean()


def trained_with_weights() -> tuple[int, int, list[float]]:
    """Steps and samples of all ranks, and the dense weights of this one, on batches with weights of
    samples and no dense part; rank 1 has two batches fewer."""
    model = sharded(WithoutDense())
    batches = [
        {"sparse": batch.sparse, "labels": batch.labels.long(), "weights": torch.rand(8)}
        for batch in fixed_batches(7 - 2 * dist.get_rank())
    ]
    with TrainPipeline(model, weighted_loss, make_optimizers(model), capture=True) as pipeline:
        history = train(pipeline, batches)
    assert isinstance(model, TinyModel)
    assert isinstance(model.dense, nn.Linear)
    return history.num_steps, history.num_samples, model.dense.weight.flatten().tolist()


def test_a_rank_without_batches_is_given_empty_ones_of_their_form() -> None:
    first, second = run_on_ranks(2, trained_with_weights)
    assert first[:2] == (7, (7 + 5) * 8)
    # Dense gradients are means over ranks, so that both have the same weights.
    assert second == first
    assert all(map(math.isfinite, first[2]))


def error_of_unequal_numbers() -> str:
    class OfBatch(TinyModel):
        def forward(self, batch: Any) -> Tensor:
            return super().forward(batch["x"], batch["ids"])[:, 0]

    def loss_fn(output: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(output, batch["y"])

    model = sharded(OfBatch())
    batches = [
        {"x": batch.dense, "ids": batch.sparse, "y": batch.labels}
        for batch in fixed_batches(4 - dist.get_rank())
    ]
    pipeline = TrainPipeline(model, BatchLoss(loss_fn), make_optimizers(model), capture=True)
    try:
        train(pipeline, batches)
    except ValueError as error:
        return str(error)
    return ""


def test_other_forms_must_be_equally_many_on_all_ranks() -> None:
    first, second = run_on_ranks(2, error_of_unequal_numbers)
    expected = "every rank must have equally many batches where they are dict and not"
    assert first.startswith(expected)
    assert "another rank has run out" in first
    assert "this rank has run out" in second
