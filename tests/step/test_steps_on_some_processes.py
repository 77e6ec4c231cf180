"""A pipeline trains a model whose tables are sharded over some of all processes, without the
others."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import torchembed
from tests.support.ranks import run_on_ranks
from torchembed import SparseFeatures
from torchembed.training import TrainPipeline

NUM_PROCESSES, SHARDING, NUM_STEPS, NUM_ROWS = 3, [0, 2], 4, 16


class Collections(nn.Module):
    """Returns the loss of vectors that a collection looks up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = torchembed.EmbeddingBagConfig(
            name="t", num_embeddings=NUM_ROWS, embedding_dim=4, feature_names=("f",)
        )
        self.table, self.over = torchembed.EmbeddingBagCollection([config]), nn.Linear(4, 1)

    def forward(self, features: SparseFeatures) -> Tensor:
        return self.over(self.table(features).values()).square().mean()


class Modules(nn.Module):
    """The same of two modules of one table, which whole processes would look up at once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (torchembed.Embedding(NUM_ROWS, 4) for _ in range(2))
        self.over = nn.Linear(4, 1)

    def forward(self, features: SparseFeatures) -> Tensor:
        vectors = self.first(features.values) + self.second(features.values)
        return self.over(vectors).square().mean()


def batch_of(step: int) -> SparseFeatures:
    values = (torch.arange(4) * (dist.get_rank() + 1) + step) % NUM_ROWS
    return SparseFeatures(keys=("f",), values=values, batch_size=4, hotness=(1,))


def trained_on_some() -> list[dict[str, Any]]:
    """For each model the losses of a loop and of a pipeline, and how that took its steps."""
    mesh, found = DeviceMesh("cpu", SHARDING), []
    if dist.get_rank() not in SHARDING:
        return []
    for kind in (Collections, Modules):
        losses: dict[str, Any] = {}
        for way in ("loop", "pipeline"):
            model = torchembed.shard_embeddings(kind(), mesh)
            optimizer = torchembed.optim.Adagrad.with_dense(model.parameters(), lr=0.1)
            if way == "loop":
                losses[way] = []
                for step in range(NUM_STEPS):
                    optimizer.zero_grad()
                    loss = model(batch_of(step))
                    loss.backward()
                    optimizer.step()
                    losses[way].append(loss.item())
                continue
            with pytest.warns(UserWarning, match="tables are sharded over some of all processes"):
                pipeline = TrainPipeline(model, None, optimizer, capture=True)
            batches = map(batch_of, range(NUM_STEPS))
            with pipeline:
                steps = [pipeline.progress(batches) for _ in range(NUM_STEPS)]
            losses[way] = [float(step.loss) for step in steps]
            losses["kinds"] = {str(step.kind) for step in steps}
        found.append(losses)
    return found


def test_processes_without_the_model_take_no_part() -> None:
    results = run_on_ranks(NUM_PROCESSES, trained_on_some, limit_seconds=60)
    for rank, found in enumerate(results):
        assert len(found) == (2 if rank in SHARDING else 0)
        for losses in found:
            assert losses["pipeline"] == losses["loop"]
            assert losses["kinds"] == {
                "eager (the model's tables are sharded over some of all processes)"
            }
