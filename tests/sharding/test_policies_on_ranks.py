"""Policies of dynamic tables on two gloo ranks: pipelines evict and admit as loops by hand do."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchembed
from tests.support.dynamic_tables import two_and_a_static_one
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import made_mesh
from torchembed import (
    LFU,
    CallerScores,
    CountMinSketch,
    DecayingLFU,
    Dynamic,
    EpochLFU,
    MinimumCount,
    Probability,
    SparseFeatures,
)
from torchembed.training import TrainPipeline

PLACEMENTS = {"a": "row_wise", "b": "column_wise", "c": "data_parallel"}
POLICIES = {
    "LRU": Dynamic(),
    "LFU": Dynamic(eviction=LFU(), admission=MinimumCount(2)),
    "EpochLFU": Dynamic(
        eviction=EpochLFU(steps_per_epoch=2), admission=CountMinSketch(threshold=2, width=64)
    ),
    "DecayingLFU": Dynamic(
        eviction=DecayingLFU(rate=0.5, steps_per_decay=2), admission=Probability(threshold=2)
    ),
    "CallerScores": Dynamic(eviction=CallerScores(), ttl_steps=2, sweep_steps=2),
    "max_rows": Dynamic(eviction=LFU(), max_rows=16, evict_to=0.5),
}
NUM_STEPS, CAPACITY = 8, 24


class Model(nn.Module):
    def __init__(self, dynamic: Dynamic) -> None:
        super().__init__()
        self.tables = two_and_a_static_one(CAPACITY, dynamic)

    def forward(self, features: SparseFeatures) -> Tensor:
        return self.tables(features).values().square().sum()


def batches_of(rank: int) -> list[SparseFeatures]:
    """As many ids at most steps; at one a rank has no samples, at one each has bags of its own
    lengths, and at each both bring some of the same new ids."""
    found = []
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(2 * step + rank)
        num_samples = 0 if (step, rank) == (6, 1) else 4
        ids = torch.randint(step * 8, step * 8 + 24, (num_samples, 6), generator=generator)
        ids[:, 0] = torch.arange(num_samples) + 1000 * step
        ids[:, 4:] %= CAPACITY
        shape: dict[str, Any] = {"hotness": (2, 2, 2)}
        values = ids.view(num_samples, 3, 2).transpose(0, 1).flatten()
        if step == 5:
            lengths = torch.tensor([2 - rank, 3 + rank, 1]).repeat(4)
            shape = {"offsets": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])}
            values = values.repeat(2)[: int(lengths.sum())] % CAPACITY
        features = SparseFeatures(
            keys=("a", "b", "c"), values=values, batch_size=num_samples, **shape
        )
        found.append(features)
    return found


def trained_on_rank(names: list[str]) -> dict[str, tuple[str, str, list[Any]]]:
    """On a rank: what a loop by hand and a pipeline leave under each policy, and their counts."""
    found = {}
    for name in names:
        states, counts = [], []
        for is_pipeline in (False, True):
            model = Model(POLICIES[name])
            named = {f"tables.embedding_bags.{t}": place for t, place in PLACEMENTS.items()}
            torchembed.shard_embeddings(model, made_mesh("cpu", 1), named)
            optimizer = torchembed.optim.Adagrad(list(model.parameters()), lr=0.5)
            batches = batches_of(dist.get_rank())
            if is_pipeline:
                with TrainPipeline(
                    model, None, [optimizer], device="cpu", capture=True
                ) as pipeline:
                    iterator = iter(batches)
                    for _ in batches:
                        pipeline.progress(iterator)
                    assert any(kind.form == "graph" for kind in pipeline.kinds)
            for batch in () if is_pipeline else batches:
                optimizer.zero_grad()
                model(batch).backward()
                optimizer.step()
            held = [
                (t.parameter.tolist(), [(k, v.tolist()) for k, v in t.index_contents().items()])
                for t in model.tables.table_set.tables
            ]
            states.append(str(held))
            counts.append(model.tables.statistics()["a"].scalars())
        found[name] = (*states, counts)
    return found


def test_pipelines_insert_and_evict_as_loops_by_hand_under_every_policy() -> None:
    for result in run_on_ranks(2, trained_on_rank, list(POLICIES)):
        for name, (by_hand, by_pipeline, (counts, same)) in result.items():
            assert counts == same, name
            assert by_hand == by_pipeline, name
            # Ids that both ranks bring are one, and the others find a row or are refused.
            assert counts["size"] <= counts["inserted"] <= counts["misses"]
            if name == "max_rows":
                assert counts["evicted_target"] > 0
            elif POLICIES[name].admission is None:
                assert counts["evicted_full"] + counts["evicted_expired"] + counts["refused"] > 0
