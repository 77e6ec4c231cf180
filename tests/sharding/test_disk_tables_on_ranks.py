"""Tables on disk that several gloo ranks share, each in a folder of its own."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import torchembed
from tests.support.disk_tables import tables_of
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import (
    Case,
    assert_equal_training,
    made_mesh,
    make_model,
    rows_of,
    train_sharded,
    train_unsharded,
)
from tests.support.stored_modules import StoredModules, batches, largest_batch, train_by_hand
from torchembed import Disk
from torchembed.modules.sharded.model_plan import table_specs
from torchembed.optim import Adam
from torchembed.sharding import make_plan
from torchembed.tables import Storage
from torchembed.training import TrainPipeline

ROW_WISE = dict.fromkeys("abcd", "row_wise")
MIXED = {"a": "row_wise", "b": "column_wise", "c": "data_parallel", "d": "table_wise"}
CASES = [
    Case(placements=ROW_WISE, stored=tuple("abcd"), optimizer="Adam", fixed=True),
    Case(placements=MIXED, stored=("a", "b", "d"), optimizer="RowwiseAdagrad"),
    Case(placements=MIXED, stored=("a",), planned=("b", "d"), pooled=False),
    Case(placements=ROW_WISE, stored=("a", "b"), dynamic=("b",), on_bad_id="zero"),
]
NUM_STEPS, NUM_RANKS = 9, 2
PLACEMENTS = ("row_wise", "table_wise", "column_wise", "row_wise", "table_wise", "row_wise")


def test_sharded_equals_unsharded_on_the_device(tmp_path: Path) -> None:
    storage = Disk(path=tmp_path, cache_rows=24, host_rows=40)
    cases = [dataclasses.replace(case, storage=storage) for case in CASES]
    results = run_on_ranks(NUM_RANKS, train_sharded, cases)
    for number, case in enumerate(CASES):
        of_ranks = [rank_results[number] for rank_results in results]
        on_device = dataclasses.replace(case, stored=(), planned=())
        assert_equal_training(case, of_ranks, train_unsharded(on_device, NUM_RANKS))
    assert set(os.listdir(tmp_path)) == {"rank_0_of_2", "rank_1_of_2"}


def modules_on_rank(storage: Storage | None) -> list[Any]:
    """On a rank: the losses and the rows of each module by a loop, eager and captured steps."""
    found, rank = [], dist.get_rank()
    placements = {f"tables.{number}": placement for number, placement in enumerate(PLACEMENTS)}
    for capture in (None, False, True):
        model = StoredModules(storage)
        plan = make_plan(table_specs(model), NUM_RANKS, placements)
        torchembed.shard_embeddings(model, made_mesh("cpu", 1), plan)
        of = batches(NUM_STEPS, first=rank, stride=NUM_RANKS)
        if capture is None:
            losses = train_by_hand(model, of)
        else:
            optimizer = Adam.with_dense(model.parameters(), lr=0.05)
            with TrainPipeline(model, None, [optimizer], device="cpu", capture=capture) as pipeline:
                losses = [pipeline.progress(of).loss.item() for _ in range(NUM_STEPS)]
                assert ("graph" in map(str, pipeline.kinds)) is capture
        rows = [[tensor.numpy() for tensor in _flat(rows_of(t))] for t in tables_of(model)]
        found.append((losses, rows))
    return found


def _flat(rows: tuple[torch.Tensor, list[torch.Tensor]]) -> list[torch.Tensor]:
    weight, states = rows
    return [weight, *states]


def test_sharded_modules_equal_those_on_the_device(tmp_path: Path) -> None:
    num_rows = largest_batch(batches(NUM_STEPS * NUM_RANKS)) + 2
    storage = Disk(path=tmp_path, cache_rows=num_rows, host_rows=2 * num_rows)
    on_device = run_on_ranks(NUM_RANKS, modules_on_rank, None)
    on_disk = run_on_ranks(NUM_RANKS, modules_on_rank, storage)
    for expected, found in zip(on_device, on_disk, strict=True):
        for (losses, rows), (own_losses, own_rows) in zip(expected, found, strict=True):
            assert own_losses == losses
            for tensors, own in zip(rows, own_rows, strict=True):
                for one, other in zip(tensors, own, strict=True):
                    np.testing.assert_array_equal(other, one)


def given_rows_on_rank(storage: Disk) -> list[Any]:
    """On a rank: the rows of a model that is sharded to disk with other rows than at first."""
    case = Case(placements=ROW_WISE, planned=("a", "b"), storage=storage)
    model = make_model(case)
    for table in tables_of(model):
        table.parameter.data[1::3] = torch.arange(table.num_columns, dtype=torch.float32)
    torchembed.shard_embeddings(model, made_mesh("cpu", 1), case.plan(NUM_RANKS))
    return [rows_of(table)[0].numpy() for table in tables_of(model)]


def test_rows_that_a_model_has_are_taken_over(tmp_path: Path) -> None:
    storage = Disk(path=tmp_path, cache_rows=24, host_rows=40)
    found = run_on_ranks(NUM_RANKS, given_rows_on_rank, storage)
    expected = make_model(Case(placements=ROW_WISE))
    for number, table in enumerate(tables_of(expected)):
        rows = table.parameter.data
        rows[1::3] = torch.arange(table.num_columns, dtype=torch.float32)
        np.testing.assert_array_equal(
            np.concatenate([of_rank[number] for of_rank in found]), rows.numpy()
        )


def trained_before_on_rank(storage: Disk) -> None:
    case = Case(placements=ROW_WISE, stored=("a",), storage=storage)
    model = make_model(case)
    batch = torchembed.SparseFeatures(
        keys=("f0", "f1", "f2", "f3"), values=torch.zeros(4).long(), batch_size=1, hotness=(1,) * 4
    )
    optimizer = Adam(model.parameters(), lr=0.1)
    model.tables(batch).values().sum().backward()
    optimizer.step()
    del optimizer
    with pytest.raises(ValueError, match="table a on disk was trained before it is sharded; shard"):
        torchembed.shard_embeddings(model, made_mesh("cpu", 1), case.plan(NUM_RANKS))


def test_refuses_rows_on_disk_that_no_shard_has(tmp_path: Path) -> None:
    run_on_ranks(
        NUM_RANKS, trained_before_on_rank, Disk(path=tmp_path, cache_rows=24, host_rows=40)
    )
