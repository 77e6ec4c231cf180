"""Sharded modules of one table, with rows in host memory or on disk, train as on the device."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch.distributed as dist

import torchembed
from tests.support.disk_tables import tables_of
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import made_mesh, rows_of
from tests.support.stored_modules import StoredModules, batches, largest_batch, train_by_hand
from torchembed import Disk, HostMemory
from torchembed.modules.sharded.model_plan import table_specs
from torchembed.optim import Adam
from torchembed.sharding import make_plan
from torchembed.tables import Storage
from torchembed.training import TrainPipeline

NUM_STEPS, NUM_RANKS = 9, 2
PLACEMENTS = ("row_wise", "table_wise", "column_wise", "row_wise", "table_wise", "row_wise")
NUM_ROWS = largest_batch(batches(NUM_STEPS * NUM_RANKS)) + 2
"""Rows of a cache that holds those of one batch of both ranks."""


class Trained(NamedTuple):
    """The losses of a training, and what a rank then holds of each module."""

    losses: list[float]
    rows: list[list[np.ndarray]]
    """With optimizer states."""
    weights: list[np.ndarray | None]
    """The modules' own, None of one that is not here; none of modules on disk."""


def trained_on_rank(storage: Storage | None, is_planned: bool) -> list[Trained]:
    """On a rank: training by a loop, in eager and in captured steps. The modules have the storage,
    but where ``is_planned`` the plan has it in the latter two."""
    found, rank = [], dist.get_rank()
    placements = {f"tables.{number}": placement for number, placement in enumerate(PLACEMENTS)}
    for capture in (None, False, True):
        of_plan = is_planned and capture is not None
        model = StoredModules(None if of_plan else storage)
        plan = make_plan(table_specs(model), NUM_RANKS, placements)
        if of_plan:
            tables = [dataclasses.replace(table, storage=storage) for table in plan.tables]
            plan = dataclasses.replace(plan, tables=tuple(tables))
        torchembed.shard_embeddings(model, made_mesh("cpu", 1), plan)
        of = batches(NUM_STEPS, first=rank, stride=NUM_RANKS)
        if capture is None:
            losses = train_by_hand(model, of)
        else:
            optimizer = Adam.with_dense(model.parameters(), lr=0.05)
            with TrainPipeline(model, None, [optimizer], device="cpu", capture=capture) as pipeline:
                losses = [pipeline.progress(of).loss.item() for _ in range(NUM_STEPS)]
                assert ("graph" in map(str, pipeline.kinds)) is capture
        weights: list[Any] = []
        if not isinstance(storage, Disk):
            for module in model.tables:
                module.write_back()
            weights = [module.weight for module in model.tables]
        rows = [rows_of(table) for table in tables_of(model)]
        found.append(
            Trained(
                losses,
                [[one.numpy() for one in (of_table, *states)] for of_table, states in rows],
                [None if weight is None else weight.detach().numpy() for weight in weights],
            )
        )
    return found


@pytest.fixture(scope="module")
def on_device() -> list[list[Trained]]:
    return run_on_ranks(NUM_RANKS, trained_on_rank, None, False)


@pytest.mark.parametrize(
    ("storage_in", "is_planned"),
    [
        (lambda _: HostMemory(cache_rows=NUM_ROWS), True),
        (lambda path: Disk(path=path, cache_rows=NUM_ROWS, host_rows=2 * NUM_ROWS), False),
    ],
    ids=["host memory", "disk"],
)
def test_sharded_modules_equal_those_on_the_device(
    storage_in: Callable[[Path], Storage],
    is_planned: bool,
    on_device: list[list[Trained]],
    tmp_path: Path,
) -> None:
    found = run_on_ranks(NUM_RANKS, trained_on_rank, storage_in(tmp_path), is_planned)
    for of_rank, expected_of_rank in zip(found, on_device, strict=True):
        for trained, expected in zip(of_rank, expected_of_rank, strict=True):
            assert trained.losses == expected.losses
            for rows, others in zip(trained.rows, expected.rows, strict=True):
                for one, other in zip(rows, others, strict=True):
                    np.testing.assert_array_equal(one, other)
            if is_planned:
                for weight, other in zip(trained.weights, expected.weights, strict=True):
                    np.testing.assert_array_equal(weight, other)
