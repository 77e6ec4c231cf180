"""Batches that a pipeline has prepared, and that are not trained next: tables in host memory and on
disk train what tables on the device do, or say what is wrong."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchembed import (
    LFU,
    Disk,
    Dynamic,
    EmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    HostMemory,
    SparseFeatures,
)
from torchembed.data import Batch
from torchembed.optim import SGD, Adagrad
from torchembed.tables import Storage, row_chunks, table_of
from torchembed.tables.tiers.line_store import LineStore
from torchembed.training import TrainPipeline

NUM_ROWS, NUM_IDS = 400, 20
LOSS = nn.MSELoss()


class Sum(nn.Module):
    """A weighted sum of each vector of one table."""

    def __init__(self, storage: Storage | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = EmbeddingBagConfig(
            name="item",
            num_embeddings=NUM_ROWS,
            embedding_dim=4,
            feature_names=("item",),
            storage=storage,
        )
        self.tables = EmbeddingBagCollection([config])
        self.over = nn.Linear(4, 1)

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        return self.over(self.tables(sparse).values()).squeeze(1)

    def rows(self) -> Tensor:
        table = table_of(next(self.tables.parameters()))
        assert table is not None
        return torch.cat([chunk.rows.clone() for chunk in row_chunks(table, 1 << 20)])


def batch(number: int) -> Batch:
    """Twenty rows that no other batch has."""
    ids = torch.arange(NUM_IDS * number, NUM_IDS * (number + 1))
    sparse = SparseFeatures(keys=("item",), values=ids, batch_size=NUM_IDS, hotness=(1,))
    return Batch(torch.zeros(NUM_IDS, 1), sparse, torch.ones(NUM_IDS))


def pipeline_of(model: Sum) -> TrainPipeline:
    optimizer = Adagrad.with_dense(model.parameters(), lr=0.1)
    return TrainPipeline(model, LOSS, optimizer, capture=True)


def steps(pipeline: TrainPipeline, batches: Iterator[Batch], count: int) -> list[float]:
    return [float(pipeline.progress(batches).loss) for _ in range(count)]


Outcome = tuple[list[float], Tensor]


def dropped(storage: Storage | None, slow_down: Callable[[], Any] = lambda: None) -> Outcome:
    """Iterators that change while a batch of each is prepared; the next one begins with it."""
    model = Sum(storage)
    with pipeline_of(model) as pipeline:
        losses = steps(pipeline, iter([batch(number) for number in range(10)]), 10)
        slow_down()
        for number in range(5):
            losses += steps(pipeline, iter([batch(10), batch(number)]), 1)
            losses += steps(pipeline, iter([batch(number), batch(5 + number)]), 2)
    return losses, model.rows()


def test_lines_that_are_read_for_a_dropped_batch_are_there_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = LineStore.read

    def slow_read(store: LineStore, rows: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(0.05)
        return read(store, rows)

    losses, rows = dropped(None)
    found, found_rows = dropped(
        Disk(path=tmp_path, host_rows=110, cache_rows=50),
        lambda: monkeypatch.setattr(LineStore, "read", slow_read),
    )
    assert found == losses
    assert torch.equal(found_rows, rows)


@pytest.mark.parametrize("is_on_disk", [False, True], ids=["host memory", "disk"])
def test_a_closed_pipeline_keeps_no_rows_for_the_batch_that_it_has_prepared(
    is_on_disk: bool, tmp_path: Path
) -> None:
    def trained(storage: Storage | None) -> Outcome:
        model = Sum(storage)
        with pipeline_of(model) as pipeline:
            losses = steps(pipeline, map(batch, range(12)), 5)
        optimizer = Adagrad.with_dense(model.parameters(), lr=0.1)
        for one in map(batch, range(12)):
            optimizer.zero_grad()
            loss = LOSS(model(one.dense, one.sparse), one.labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, model.rows()

    on_host: Storage = HostMemory(cache_rows=90)
    on_disk: Storage = Disk(path=tmp_path, host_rows=190, cache_rows=90)
    losses, rows = trained(None)
    found, found_rows = trained(on_disk if is_on_disk else on_host)
    assert found == losses
    assert torch.equal(found_rows, rows)


def in_turns(storage: Storage | None) -> Outcome:
    """Two pipelines over one model, of which the first one has a batch prepared while the other
    trains."""
    model = Sum(storage)
    optimizer = Adagrad.with_dense(model.parameters(), lr=0.1)
    first, second = (TrainPipeline(model, LOSS, optimizer, capture=True) for _ in range(2))
    of_first = map(batch, range(6))
    losses = steps(first, of_first, 4)
    losses += steps(second, map(batch, range(6, 16)), 10)
    losses += steps(first, of_first, 2)
    first.close()
    second.close()
    return losses, model.rows()


def test_rows_that_another_pipeline_has_evicted_are_fetched_again() -> None:
    losses, rows = in_turns(None)
    found, found_rows = in_turns(HostMemory(cache_rows=70))
    assert found == losses
    assert torch.equal(found_rows, rows)


def test_rows_that_another_pipeline_has_moved_to_disk_are_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="close one pipeline before another trains them"):
        in_turns(Disk(path=tmp_path, host_rows=100, cache_rows=45))


class Bag(nn.Module):
    """The sum of a dynamic table's vectors."""

    def __init__(self, storage: Storage | None) -> None:
        super().__init__()
        dynamic = Dynamic(missing="initial", eviction=LFU())
        self.bag = EmbeddingBag(40, 4, mode="sum", seed=0, dynamic=dynamic, storage=storage)

    def forward(self, ids: Tensor) -> Tensor:
        return self.bag(ids).sum()


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_new_rows_are_read_with_their_values_before_they_are_trained(
    kind: str, tmp_path: Path
) -> None:
    """Where they were others' and are in the cache still, from which nothing was to be written."""
    storage: Storage = HostMemory(cache_rows=12)
    if kind == "disk":
        pytest.importorskip("rocksdict", reason="tables on disk are kept by rocksdict")
        storage = Disk(path=tmp_path, cache_rows=12, host_rows=20)
    model, initial = Bag(storage), Bag(None).eval()
    optimizer = SGD(model.parameters(), lr=0.0)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(60, (6, 1), generator=generator) for _ in range(30)]
    with TrainPipeline(model, None, optimizer, capture=True) as pipeline:
        iterator = iter(batches)
        for _ in batches:
            pipeline.progress(iterator)
            (table,) = model.bag.table_set.tables
            for chunk in row_chunks(table, 1 << 20):
                assert torch.equal(chunk.rows, initial.bag(chunk.keys.unsqueeze(1)))
