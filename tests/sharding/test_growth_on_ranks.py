"""Dynamic tables that several gloo ranks share, and that grow: on all of them before one batch."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import torchembed
from tests.support.hash_tables import blocks_of
from tests.support.ranks import run_on_ranks
from torchembed import Dynamic, EmbeddingBagConfig, SparseFeatures
from torchembed.modules.sharded.model_plan import table_specs
from torchembed.sharding import make_plan
from torchembed.tables import Table, row_chunks
from torchembed.training import TrainPipeline

NUM_RANKS, NUM_STEPS = 2, 14
PLACEMENTS = {"a": "row_wise", "b": "table_wise", "c": "column_wise"}
CAPACITY = 2048


class Summed(nn.Module):
    """The mean of the sums of samples' vectors, of a collection and a module of one table; no sum
    is rounded, in whatever order."""

    def __init__(
        self, capacity: int, initial_capacity: int | None, *, has_single: bool = True
    ) -> None:
        super().__init__()
        dynamic = Dynamic(initial_capacity=initial_capacity)
        configs = [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=capacity,
                embedding_dim=4,
                feature_names=(name,),
                dynamic=dynamic,
            )
            for name in "abc"
        ]
        self.tables = torchembed.EmbeddingBagCollection(configs, device="meta")
        self.single = None
        if has_single:
            self.single = torchembed.EmbeddingBag(
                capacity, 4, mode="sum", seed=1, dynamic=dynamic, device="meta"
            )

    def forward(self, features: SparseFeatures) -> Tensor:
        vectors = self.tables(features).values()
        loss = (vectors + (1 - vectors).detach()).sum() / 4
        if self.single is not None:
            vectors = self.single(features.values.view(4, -1))
            loss = loss + (vectors + (1 - vectors).detach()).sum() / 4
        return loss

    def parts(self) -> list[Table]:
        """The tables, or parts of tables, that are held here."""
        single = [] if self.single is None else self.single.table_set.tables
        return [*self.tables.table_set.tables, *single]


def batches(rank: int, num_ids: int) -> Iterator[SparseFeatures]:
    """4 samples with ids of which more and more are new ones, others on each rank."""
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(NUM_RANKS * step + rank)
        high = num_ids * (step + 1)
        ids = torch.randint(high, (12 * num_ids,), generator=generator) + 2 * high * rank
        yield SparseFeatures(keys=tuple("abc"), values=ids, batch_size=4, hotness=(num_ids,) * 3)


def trained(num_ids: int, capacity: int, capture: bool | None) -> dict[str, Any]:
    """On a rank: the rows of each table after each step, and the ids with their rows at last; by
    hand where ``capture`` is None."""
    model = Summed(capacity, capacity // 16, has_single=capture is None and capacity == CAPACITY)
    places = {f"tables.embedding_bags.{name}": place for name, place in PLACEMENTS.items()}
    if model.single is not None:
        places["single"] = "row_wise"
    plan = make_plan(table_specs(model), NUM_RANKS, places)
    torchembed.shard_embeddings(model, init_device_mesh("cpu", (NUM_RANKS,)), plan)
    optimizer = torchembed.optim.SGD(model.parameters(), lr=0.5)
    held, sizes = model.parts(), []
    source = batches(dist.get_rank(), num_ids)
    pipeline = None
    if capture is not None:
        pipeline = TrainPipeline(model, None, [optimizer], device="cpu", capture=capture)
    for _ in range(NUM_STEPS):
        if pipeline is not None:
            pipeline.progress(source)
        else:
            optimizer.zero_grad()
            model(next(source)).backward()
            optimizer.step()
        sizes.append({table.spec.name: table.num_rows for table in held})
    if pipeline is not None:
        pipeline.close()
    rows = {}
    for table in held:
        chunks = [(chunk.keys.clone(), chunk.rows.clone()) for chunk in row_chunks(table, 2**30)]
        rows[table.spec.name, table.first_column] = chunks[0]
    statistics = model.tables.statistics()
    return {"sizes": sizes, "rows": rows, "evicted": {n: s.evicted for n, s in statistics.items()}}


def trained_in_all_ways() -> list[dict[str, Any]]:
    """On a rank: where nothing is evicted, by hand; and with small blocks, that evict, by hand and
    in a pipeline."""
    with pytest.MonkeyPatch.context() as patch:
        blocks_of(256, patch)
        found = [trained(20, CAPACITY, None)]
        blocks_of(8, patch)
        return found + [trained(3, 256, capture) for capture in (None, True)]


def rows_by_id(of_ranks: list[dict[str, Any]], name: str) -> dict[int, list[float]]:
    """The rows of a table by id, its columns side by side."""
    parts = sorted((key, rank) for rank, of in enumerate(of_ranks) for key in of["rows"])
    found: dict[int, list[float]] = {}
    for (table, column), rank in parts:
        if table == name:
            ids, rows = of_ranks[rank]["rows"][table, column]
            for id_, row in zip(ids.tolist(), rows.tolist(), strict=True):
                found.setdefault(id_, []).extend(row)
    return found


def test_all_ranks_let_tables_grow_before_the_same_batch() -> None:
    results = run_on_ranks(NUM_RANKS, trained_in_all_ways)
    unsharded, *ways = zip(*results, strict=True)
    whole = Summed(CAPACITY, None)
    whole.to_empty(device="cpu")
    optimizer = torchembed.optim.SGD(whole.parameters(), lr=0.5)
    for of_ranks in zip(*(batches(rank, 20) for rank in range(NUM_RANKS)), strict=True):
        optimizer.zero_grad()
        (torch.stack([whole(batch) for batch in of_ranks]).sum() / NUM_RANKS).backward()
        optimizer.step()
    for table in whole.parts():
        (chunk,) = row_chunks(table, 2**30)
        expected = dict(zip(chunk.keys.tolist(), chunk.rows.tolist(), strict=True))
        assert rows_by_id(list(unsharded), table.spec.name) == expected
    for of_ranks in (unsharded, *ways):
        names = [*PLACEMENTS, *(["weight"] if of_ranks is unsharded else [])]
        for name in names:
            of_each = [[step[name] for step in of["sizes"] if name in step] for of in of_ranks]
            first, *others = [sizes for sizes in of_each if sizes]
            assert all(sizes == first for sizes in others)
            assert len(set(first)) > 1
    assert all(of["evicted"] == {} or not any(of["evicted"].values()) for of in unsharded)
    assert any(any(of["evicted"].values()) for of in ways[0])
    for way in ways[1:]:
        for of, expected_of in zip(way, ways[0], strict=True):
            assert of["sizes"] == expected_of["sizes"]
            assert of["evicted"] == expected_of["evicted"]
        for name in PLACEMENTS:
            assert rows_by_id(list(way), name) == rows_by_id(list(ways[0]), name)
