"""Dynamic tables that grow between the steps of pipelines, as in a loop by hand."""

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchembed
from tests.support.hash_tables import blocks_of
from tests.support.lanes import picked_kernel
from tests.support.tape import taped_captures
from tests.support.tiny_model import step_by_hand
from tests.support.tiny_training import assert_same_state, results_of, state_of
from torchembed import Dynamic, EmbeddingBag, EmbeddingBagConfig, SparseFeatures
from torchembed.data import Batch
from torchembed.optim import split_parameters
from torchembed.training import TrainPipeline

CPU = torch.device("cpu")
KEYS = ("a", "b", "c")
LOSS = F.binary_cross_entropy_with_logits


class Ranker(nn.Module):
    """A logit from vectors of two dynamic tables that grow, one of which two features use, and of a
    module of one such table."""

    def __init__(self, *, has_single: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        policies = Dynamic(initial_capacity=8)

        def config(name: str, *features: str) -> EmbeddingBagConfig:
            return EmbeddingBagConfig(
                name=name,
                num_embeddings=128,
                embedding_dim=4,
                feature_names=features,
                dynamic=policies,
            )

        self.tables = torchembed.EmbeddingBagCollection([config("a", "a", "c"), config("b", "b")])
        self.single = None
        if has_single:
            self.single = EmbeddingBag(64, 4, mode="sum", seed=1, dynamic=policies)
        self.dense = nn.Linear(14, 1)

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        vectors = self.tables(sparse).values()
        if self.single is not None:
            vectors = vectors + self.single(sparse.values[:16].view(8, 2)).repeat(1, 3)
        return self.dense(torch.cat([dense, vectors], dim=1))

    def num_rows(self) -> list[int]:
        singles = [] if self.single is None else self.single.table_set.tables
        return [table.num_rows for table in (*self.tables.table_set.tables, *singles)]


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    tables, dense = split_parameters(model.parameters())
    return [torchembed.optim.Adam(tables, lr=0.05), torch.optim.Adam(dense, lr=0.05)]


def batch(step: int, *, is_jagged: bool = False) -> Batch:
    """Ids of which more and more are new ones."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.tensor([2, 1, 3]).repeat_interleave(8)
    if is_jagged:
        lengths = torch.randint(2, 4, (24,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(2 * step + 1, (int(offsets[-1]),), generator=generator) + step
    shape: dict[str, Any] = {"offsets": offsets} if is_jagged else {"hotness": (2, 1, 3)}
    sparse = SparseFeatures(keys=KEYS, values=ids, batch_size=8, **shape)
    dense = torch.randint(-2, 3, (8, 2), generator=generator).float()
    return Batch(dense, sparse, (dense[:, 0] > 0).float())


def by_hand(model: Ranker, batches: Sequence[Batch]) -> tuple[list[float], list[list[int]]]:
    optimizers = optimizers_of(model)
    losses, sizes = [], []
    for one in batches:
        losses.append(step_by_hand(model, LOSS, optimizers, one).item())
        sizes.append(model.num_rows())
    return losses, sizes


BATCHES = {
    "fixed": [batch(step) for step in range(24)],
    "jagged": [batch(step, is_jagged=True) for step in range(24)],
    "mixed": [batch(step, is_jagged=step in (5, 6, 11)) for step in range(24)],
}


@pytest.mark.parametrize("captures", ["eager", "called", "taped"])
@pytest.mark.parametrize("form", BATCHES)
def test_pipelines_let_tables_grow_before_the_same_batches(
    form: str, captures: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where small blocks are full before, and evict, so that each must hold the same ids."""
    if captures == "taped" and picked_kernel("insert_keys", "cpu") != "native":
        pytest.skip("a tape refuses the reference of insert_keys, which is the host's own work")
    blocks_of(8, monkeypatch)
    # Of jagged batches, only the ids of collections are prepared ahead.
    has_single = form == "fixed"
    expected, model = Ranker(has_single=has_single), Ranker(has_single=has_single)
    losses, sizes = by_hand(expected, BATCHES[form])
    parameters = list(model.parameters())
    with taped_captures() if captures == "taped" else contextlib.nullcontext():
        pipeline = TrainPipeline(
            model, LOSS, optimizers_of(model), device=CPU, capture=captures != "eager"
        )
        assert results_of(pipeline, BATCHES[form]) == losses
    assert_same_state(model, state_of(expected))
    assert model.num_rows() == expected.num_rows() == [128, 128, *[64] * has_single]
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert len({tuple(of_step) for of_step in sizes}) >= 4
    statistics = expected.tables.statistics()
    assert statistics["a"].evicted_full > 0
    captured = [str(kind.form) for kind in pipeline.kinds]
    assert ("graph" in captured) == (form != "jagged" and captures != "eager")
