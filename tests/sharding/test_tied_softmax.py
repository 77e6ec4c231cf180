"""A softmax over all rows of a table that is looked up as well: refused where the table is sharded,
trained where every rank holds it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import made_mesh
from tests.support.tolerance import assert_follows, assert_same_bits
from torchembed.training import TrainPipeline

NUM_ROWS, DIM, NUM_SAMPLES, NUM_STEPS = 6, 4, 8, 5
WHY = r"weight\.grad of table item is set, .* sharded: .* Look up what the loss needs"


class NextItem(nn.Module):
    """Scores all items by the vector of the last one."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        """``dtype``: of torch's table; None for ours."""
        super().__init__()
        config = torchembed.EmbeddingConfig(
            name="item", num_embeddings=NUM_ROWS, embedding_dim=DIM, feature_names=("last",)
        )
        self.tables: Any = torchembed.EmbeddingCollection([config])
        if dtype is not None:
            rows = self.tables.table_set.tables[0].parameter.detach()
            self.tables = nn.Embedding.from_pretrained(rows.to(dtype, copy=True), freeze=False)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["last"]
        if isinstance(self.tables, nn.Embedding):
            vectors, weight = self.tables(ids), self.tables.weight
        else:
            features = torchembed.SparseFeatures(
                keys=("last",), values=ids, batch_size=len(ids), hotness=(1,)
            )
            vectors = self.tables(features)["last"].values()
            weight = self.tables.embeddings["item"].weight
        return F.cross_entropy(vectors @ weight.T, batch["next"] % len(weight))


def batch_of(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    last, following = torch.randint(NUM_ROWS, (2, NUM_SAMPLES), generator=generator)
    return {"last": last, "next": following}


def train_once(model: NextItem, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> None:
    model(batch).backward()
    optimizer.step()


def on_a_rank() -> Tensor:
    rank = dist.get_rank()
    model = NextItem()
    torchembed.shard_embeddings(model, made_mesh("cpu", 1), {"tables.embeddings.item": "row_wise"})
    optimizer = torchembed.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=WHY):
        train_once(model, optimizer, batch_of(rank, 0))
    optimizer.zero_grad()
    pipeline = TrainPipeline(model, None, [optimizer], device="cpu")
    with pytest.raises(RuntimeError, match=WHY):
        pipeline.progress(iter([batch_of(rank, 0)]))

    model, plan = NextItem(), {"tables.embeddings.item": "data_parallel"}
    torchembed.shard_embeddings(model, made_mesh("cpu", 1), plan)
    pipeline = TrainPipeline(model, None, [torch.optim.SGD(model.parameters(), lr=0.1)])
    batches = (batch_of(rank, step) for step in range(NUM_STEPS))
    for _ in range(NUM_STEPS):
        pipeline.progress(batches)
    return next(model.parameters()).detach()


def test_a_sharded_table_and_one_that_every_rank_holds() -> None:
    first, second = run_on_ranks(2, on_a_rank)
    assert_same_bits(first, second)

    def formula(dtype: torch.dtype) -> Tensor:
        model = NextItem(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            torch.stack([model(batch_of(rank, step)) for rank in range(2)]).mean().backward()
            optimizer.step()
        return model.tables.weight.detach()

    assert_follows(first, formula)


def test_an_unsharded_table_says_which_optimizer_trains_it() -> None:
    model = NextItem()
    optimizer = torchembed.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"softmax over all rows, .* an optimizer of torch"):
        train_once(model, optimizer, batch_of(0, 0))
