"""Tables on disk that several gloo ranks share, each in a folder of its own."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchembed
from tests.support.disk_tables import tables_of
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import Case, made_mesh, make_model, rows_of
from tests.support.stored_cases import MIXED, ROW_WISE, check_training_is_as_on_the_device
from torchembed import Disk
from torchembed.optim import Adam

CASES = [
    Case(placements=ROW_WISE, stored=tuple("abcd"), optimizer="Adam", fixed=True),
    Case(placements=MIXED, stored=("a", "b", "d"), optimizer="RowwiseAdagrad"),
    Case(placements=MIXED, stored=("a",), planned=("b", "d"), pooled=False),
    Case(placements=ROW_WISE, stored=("a", "b"), dynamic=("b",), on_bad_id="zero"),
]
NUM_RANKS = 2


def test_sharded_equals_unsharded_on_the_device(tmp_path: Path) -> None:
    storage = Disk(path=tmp_path, cache_rows=24, host_rows=40)
    cases = [dataclasses.replace(case, storage=storage) for case in CASES]
    check_training_is_as_on_the_device(cases, NUM_RANKS)
    assert set(os.listdir(tmp_path)) == {"rank_0_of_2", "rank_1_of_2"}


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
    model: Any = make_model(case)
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
