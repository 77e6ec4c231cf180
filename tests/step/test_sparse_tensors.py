"""Sparse gradients, sparse buffers and nested tensors beside our tables, in every kind of step and
on several ranks, as a plain loop trains them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import made_mesh
from tests.support.tape import taped_captures
from tests.support.tolerance import assert_follows, assert_same_bits
from torchembed.tables import table_of
from torchembed.training import TrainPipeline

NUM_ROWS, DIM, NUM_SAMPLES, NUM_STEPS = 10, 4, 8, 8
SPARSE = ("vectors.weight", "bags.weight")

Batch = dict[str, Tensor]


class Model(nn.Module):
    """A table of ours beside torch's with sparse gradients, a graph in a sparse buffer, and values
    of a sparse and of a nested tensor that train."""

    def __init__(self, seed: int = 0, dtype: torch.dtype | None = None) -> None:
        """``dtype``: of a model with torch's table in place of ours; None for ours."""
        super().__init__()
        torch.manual_seed(seed)
        config = torchembed.EmbeddingBagConfig(
            name="t", num_embeddings=NUM_ROWS, embedding_dim=DIM, feature_names=("t",)
        )
        self.tables: Any = torchembed.EmbeddingBagCollection([config])
        if dtype is not None:
            rows = self.tables.table_set.tables[0].parameter.detach()
            self.tables = nn.EmbeddingBag.from_pretrained(rows.clone(), freeze=False, mode="sum")
        self.vectors = nn.Embedding(NUM_ROWS, DIM, sparse=True)
        self.bags = nn.EmbeddingBag(NUM_ROWS, DIM, sparse=True, mode="sum")
        adjacency = (torch.rand(NUM_ROWS, NUM_ROWS) > 0.6).float()
        self.register_buffer("adjacency", adjacency.to_sparse())
        self.register_buffer("places", torch.stack([torch.arange(6), torch.arange(6) + 3]))
        self.strengths = nn.Parameter(torch.randn(6))
        self.nodes = nn.Parameter(torch.randn(NUM_ROWS, DIM))
        self.last = nn.Linear(DIM, 1)
        self.to(dtype)

    def forward(self, batch: Batch) -> Tensor:
        ids = batch["ids"]
        features: Any = ids
        if not isinstance(self.tables, nn.EmbeddingBag):
            features = torchembed.SparseFeatures(
                keys=("t",), values=ids.flatten(), batch_size=len(ids), hotness=(ids.shape[1],)
            )
        found = self.tables(features)
        found = found if isinstance(found, Tensor) else found.values()
        shape = NUM_ROWS, NUM_ROWS
        # As a context, since torch warns where it is not said.
        with torch.sparse.check_sparse_tensor_invariants(enable=True):
            own = torch.sparse_coo_tensor(self.places, self.strengths, shape)  # type: ignore[arg-type]
        mixed = torch.sparse.mm(self.adjacency, torch.sparse.mm(own, self.nodes))
        pooled = found + self.bags(ids)
        vectors = pooled + self.vectors(ids).sum(1) + mixed[ids].sum(1)
        parts = torch.nested.nested_tensor_from_jagged(
            vectors, offsets=torch.tensor([0, 3, len(ids)], device=ids.device)
        )
        return (
            (self.last(torch.tanh(parts).values())[:, 0] - batch["wanted"].to(vectors))
            .square()
            .mean()
        )


def batches_of(rank: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(NUM_STEPS):
        ids = torch.randint(NUM_ROWS, (NUM_SAMPLES, 2), generator=generator)
        yield {"ids": ids, "wanted": torch.randn(NUM_SAMPLES, generator=generator)}


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    tables = [p for p in model.parameters() if table_of(p) is not None]
    named = [(name, p) for name, p in model.named_parameters() if table_of(p) is None]
    of_tables = [torchembed.optim.SGD(tables, lr=0.1)] if tables else []
    return [
        *of_tables,
        torch.optim.SparseAdam([p for name, p in named if name in SPARSE], lr=0.1),
        torch.optim.SGD([p for name, p in named if name not in SPARSE], lr=0.1),
    ]


def train_plainly(num_ranks: int, dtype: torch.dtype | None = None) -> Model:
    """A model after a plain loop over the batches of all ranks."""
    model = Model(dtype=dtype)
    optimizers = make_optimizers(model)
    for batches in zip(*map(batches_of, range(num_ranks)), strict=True):
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.stack([model(batch) for batch in batches]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return model


def train_by_pipeline(model: nn.Module, *, capture: bool, rank: int = 0) -> None:
    batches, optimizers = batches_of(rank), make_optimizers(model)
    with TrainPipeline(model, None, optimizers, device="cpu", capture=capture) as pipeline:
        for _ in range(NUM_STEPS):
            pipeline.progress(batches)


@pytest.mark.parametrize("capture", [False, True])
def test_one_rank(capture: bool) -> None:
    model = Model()
    train_by_pipeline(model, capture=capture)
    for one, other in zip(model.parameters(), train_plainly(1).parameters(), strict=True):
        assert_same_bits(one, other)


def test_a_capture_that_sparse_tensors_do_not_permit_is_said() -> None:
    model = Model()
    with taped_captures(), pytest.warns(UserWarning, match="not permitted when stream is capt"):
        train_by_pipeline(model, capture=True)
    for one, other in zip(model.parameters(), train_plainly(1).parameters(), strict=True):
        assert_same_bits(one, other)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def on_a_rank() -> list[tuple[Tensor, Tensor]]:
    """On a rank: its parameters and its sparse buffer after training, which begins with the first
    rank's."""
    results = []
    for capture in (False, True):
        model = Model(seed=dist.get_rank())
        plan = {"tables.embedding_bags.t": "data_parallel"}
        torchembed.shard_embeddings(model, made_mesh("cpu", 1), plan)
        train_by_pipeline(model, capture=capture, rank=dist.get_rank())
        results.append((flat(model), model.state_dict()["adjacency"].to_dense()))
    bad = Model()
    bad.last.register_parameter("mask", nn.Parameter(torch.eye(3).to_sparse()))
    with pytest.raises(ValueError, match=r"parameter last\.mask must be dense .*sparse_coo"):
        torchembed.shard_embeddings(bad, made_mesh("cpu", 1))
    return results


def test_two_ranks() -> None:
    for first, second in zip(*run_on_ranks(2, on_a_rank), strict=True):
        for one, other in zip(first, second, strict=True):
            assert_same_bits(one, other)
        assert_follows(first[0], lambda dtype: flat(train_plainly(2, dtype)))
        assert_same_bits(first[1], Model().state_dict()["adjacency"].to_dense())
