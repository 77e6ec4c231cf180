"""Statistics of caches of tables in host memory."""

import contextlib
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchembed
from tests.support.lanes import picked_kernel
from tests.support.tape import taped_captures
from tests.support.tiny_training import results_of
from torchembed import (
    CacheStatistics,
    Disk,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    HostMemory,
)
from torchembed.core.host_numbers import HostNumbers
from torchembed.data import Batch
from torchembed.tables import Storage
from torchembed.training import History, MetricsWriter, TrainPipeline, read_metrics, train

CPU = torch.device("cpu")
LINE_BYTES = 4 * 4 + 4
"""Bytes of a row of four columns with row-wise Adagrad's state."""


class Scores(nn.Module):
    """A score from the ids of two tables that share a cache, and of one on the device."""

    def __init__(self, cache_rows: int = 0, *, storage: Storage | None = None) -> None:
        super().__init__()
        storage = storage or HostMemory(cache_rows=cache_rows)
        torch.manual_seed(0)
        self.users = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=16,
                    embedding_dim=4,
                    feature_names=(name,),
                    storage=of_table,
                )
                for name, of_table in (("a", storage), ("b", storage), ("c", None))
            ]
        )

    def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
        return self.users(sparse).values().sum(1) + dense.sum(1)


def batch(of_a: Sequence[int], of_b: Sequence[int]) -> Batch:
    """One sample with four ids of each table."""
    values = torch.tensor([*of_a, *of_b, 0, 0, 0, 0])
    sparse = torchembed.SparseFeatures(
        keys=("a", "b", "c"), values=values, batch_size=1, hotness=(4, 4, 4)
    )
    return Batch(torch.zeros(1, 1), sparse, torch.zeros(1))


BATCHES = [
    batch([1, 1, 2, 3], [1, 1, 1, 1]),  # 4 rows, none of them cached
    batch([1, 2, 3, 4], [1, 1, 2, 2]),  # 6 rows, 2 of them new
    batch([1, 2, 3, 4], [1, 1, 2, 2]),  # the same
    batch([5, 6, 7, 8], [5, 5, 6, 6]),  # 6 new rows
    batch([5, 6, 7, 8], [5, 5, 6, 6]),
]


def optimizer_of(model: Scores) -> torch.optim.Optimizer:
    return torchembed.optim.RowwiseAdagrad(model.parameters(), lr=0.1)


def pipeline_of(model: Scores) -> TrainPipeline:
    return TrainPipeline(model, F.mse_loss, [optimizer_of(model)], device=CPU, capture=True)


def train_by_hand(model: Scores, batches: Sequence[Batch]) -> None:
    optimizer = optimizer_of(model)
    for one in batches:
        F.mse_loss(model(one.dense, one.sparse), one.labels).backward()
        optimizer.step()


def statistics_of(model: Scores, *, wait: bool = False) -> CacheStatistics:
    found = model.users.cache_statistics(wait=wait)
    assert found.keys() == {("a", "b")}
    return found[("a", "b")]


def statistics(**counts: Any) -> CacheStatistics:
    """The counts that do not follow from ``BATCHES`` alone."""
    of_batches = {"requested": 8 * 5, "unique": 4 + 4 * 6, "unique_misses": 12}
    moved = counts["rows_read_ahead"] + counts["rows_read_in_step"], counts["write_backs"]
    num_bytes = {"bytes_read": moved[0] * LINE_BYTES, "bytes_written": moved[1] * LINE_BYTES}
    return CacheStatistics(**of_batches, **num_bytes, **counts)


NONE_LATE = {"conflict_misses": 0, "batches_refused": 0, "batches_fetched_late": 0}


@pytest.mark.parametrize("is_taped", [False, True], ids=["called", "taped"])
def test_a_pipeline_whose_cache_holds_two_batches_fetches_no_row_late(is_taped: bool) -> None:
    if is_taped and picked_kernel("claim_slots", "cpu") != "native":
        pytest.skip("a tape refuses the reference of claim_slots, which is the host's own work")
    model = Scores(cache_rows=6)
    with taped_captures() if is_taped else contextlib.nullcontext():
        results_of(pipeline_of(model), BATCHES)
    # The first step is taken before the pipeline knows what to prepare.
    expected = statistics(
        capacity=12, size=12, rows_read_ahead=8, rows_read_in_step=4, write_backs=0, **NONE_LATE
    )
    assert statistics_of(model) == expected
    assert expected.hit_rate == 1 - 12 / 28
    assert expected.rows_read == 12


def test_a_batch_that_finds_no_place_beside_the_one_before_is_fetched_late() -> None:
    model = Scores(cache_rows=4)
    results_of(pipeline_of(model), BATCHES)
    assert statistics_of(model) == statistics(
        capacity=8,
        size=8,
        conflict_misses=6,
        batches_refused=1,
        batches_fetched_late=1,
        rows_read_ahead=2,
        rows_read_in_step=4 + 6,
        write_backs=4,
    )


def test_forwards_by_hand_read_rows_in_their_step() -> None:
    model = Scores(cache_rows=4)
    train_by_hand(model, BATCHES)
    assert statistics_of(model) == statistics(
        capacity=8, size=8, rows_read_ahead=0, rows_read_in_step=12, write_backs=4, **NONE_LATE
    )


@pytest.mark.parametrize("way", ["by hand", "called", "taped"])
def test_host_memory_and_disk_count_below_the_cache(tmp_path: Path, way: str) -> None:
    if way == "taped" and picked_kernel("claim_slots", "cpu") != "native":
        pytest.skip("a tape refuses the reference of claim_slots, which is the host's own work")
    model = Scores(storage=Disk(path=tmp_path, cache_rows=3, host_rows=6))
    batches = [
        *BATCHES,
        batch([1, 2, 3, 4], [1, 1, 2, 2]),  # 6 rows that host memory holds, and the cache does not
        batch([9, 10, 11, 12], [9, 9, 10, 10]),  # 6 new rows, for which 6 go to disk
    ]
    if way == "by hand":
        train_by_hand(model, batches)
        late = NONE_LATE
    else:
        with taped_captures() if way == "taped" else contextlib.nullcontext():
            results_of(pipeline_of(model), batches)
        # Those that wait for the disk, and the one that finds no place beside the one before.
        late = {
            "conflict_misses": 2 + 6 + 6 + 6,
            "batches_refused": 1,
            "batches_fetched_late": 4,
        }
    num_read = 4 + 2 + 6 + 6
    assert statistics_of(model) == CacheStatistics(
        capacity=6,
        size=6,
        requested=8 * 7,
        unique=4 + 6 * 6,
        unique_misses=num_read + 6,
        rows_read_ahead=0,
        rows_read_in_step=num_read + 6,
        write_backs=18,
        bytes_read=(num_read + 6) * LINE_BYTES,
        bytes_written=18 * LINE_BYTES,
        host_capacity=12,
        host_size=12,
        host_misses=num_read,
        disk_rows_read=num_read,
        disk_rows_written=6,
        disk_bytes_read=num_read * LINE_BYTES,
        disk_bytes_written=6 * LINE_BYTES,
        **late,
    )


def test_a_cache_that_was_emptied_between_two_steps_is_filled_late() -> None:
    """The batch counts once all the same."""
    model = Scores(cache_rows=6)
    pipeline, batches = pipeline_of(model), iter(BATCHES)
    for step in range(len(BATCHES)):
        pipeline.progress(batches)
        if step == 2:
            model.users.write_back()
    assert statistics_of(model) == statistics(
        capacity=12,
        size=6,
        conflict_misses=0,
        batches_refused=0,
        batches_fetched_late=1,
        rows_read_ahead=8,
        rows_read_in_step=4 + 6,
        write_backs=12,
    )


def test_evaluation_counts_nothing() -> None:
    model = Scores(cache_rows=6)
    train_by_hand(model, BATCHES)
    before = statistics_of(model)
    with torch.no_grad():
        for one in BATCHES:
            model.eval()(one.dense, one.sparse)
    assert statistics_of(model) == before


def test_a_cache_before_the_first_batch() -> None:
    model = Scores(cache_rows=6)
    found = statistics_of(model)
    assert (found.capacity, found.size, found.hit_rate) == (12, 0, 0)


def test_a_copy_that_is_under_way_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived = [False]
    monkeypatch.setattr(HostNumbers, "have_arrived", property(lambda numbers: arrived[0]))
    model = Scores(cache_rows=6)
    train_by_hand(model, BATCHES[:1])
    assert model.users.cache_statistics() == {}
    twin = copy.deepcopy(model)
    arrived[0] = True
    assert statistics_of(model).unique == 4
    assert statistics_of(twin).unique == 0  # copies begin without an optimizer, and count anew
    arrived[0] = False
    train_by_hand(model, BATCHES[1:2])
    assert statistics_of(model, wait=True).unique == 6  # another optimizer counts anew


def test_training_writes_statistics_of_caches(tmp_path: Path) -> None:
    model = Scores(cache_rows=4)
    with MetricsWriter(tmp_path) as metrics:
        train(pipeline_of(model), BATCHES, history=History(read_loss_every=2), metrics=metrics)
    lines = read_metrics(tmp_path)
    # A step that prepares the next batch has counted it.
    assert [line["users.cache/unique"] for line in lines] == [16, 28, 28]
    assert [line["users.cache/rows_read_in_step"] for line in lines] == [4, 10, 10]
    assert lines[-1]["users.cache/hit_rate"] == statistics_of(model).hit_rate
