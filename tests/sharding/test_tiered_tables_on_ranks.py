"""Tables in host memory that several gloo ranks share."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import (
    Case,
    assert_equal_training,
    made_mesh,
    train_sharded,
    train_unsharded,
)
from tests.support.stored_modules import StoredModules, batches, largest_batch, train_by_hand
from torchembed import HostMemory
from torchembed.modules.sharded.model_plan import table_specs
from torchembed.optim import Adam
from torchembed.sharding import make_plan
from torchembed.sharding.transport.global_rows import mesh_on
from torchembed.training import TrainPipeline

ROW_WISE = dict.fromkeys("abcd", "row_wise")
MIXED = {"a": "row_wise", "b": "column_wise", "c": "data_parallel", "d": "table_wise"}
TABLE_WISE = dict.fromkeys("abcd", "table_wise")
CASES = [
    Case(placements=ROW_WISE, stored=("a", "b", "d")),
    Case(placements=ROW_WISE, stored=tuple("abcd"), optimizer="Adam", fixed=True),
    Case(placements=MIXED, stored=("a", "b", "d"), optimizer="RowwiseAdagrad"),
    Case(placements=MIXED, stored=("b",), planned=("d",), weighted=True, fixed=True),
    Case(placements=MIXED, stored=("a", "b", "d"), dtype=torch.bfloat16),
    Case(placements=MIXED, stored=("a",), planned=("b", "d"), pooled=False),
    Case(placements=ROW_WISE, stored=("a", "b"), pooled=False, fixed=True, optimizer="SGD"),
    Case(placements=ROW_WISE, stored=("a", "d"), dynamic=("b",), on_bad_id="zero"),
    Case(placements=ROW_WISE, planned=("a", "b"), dynamic=("b",)),
    # Only one of the ranks has something to fetch.
    Case(placements=TABLE_WISE, stored=("b",), on_bad_id="zero", fixed=True),
]

NUM_STEPS, NUM_RANKS = 9, 2
PLACEMENTS = ("row_wise", "table_wise", "column_wise", "row_wise", "table_wise", "row_wise")


def _ranks_of_meshes() -> tuple[list[int], list[int], str]:
    mesh = init_device_mesh("cpu", (2,))
    other = mesh_on(mesh, "meta")
    return mesh.mesh.tolist(), other.mesh.tolist(), other.device_type


def test_a_mesh_for_another_device_has_the_same_ranks() -> None:
    assert run_on_ranks(2, _ranks_of_meshes) == [([0, 1], [0, 1], "meta")] * 2


def test_refuses_tables_that_every_rank_would_hold() -> None:
    case = Case(placements=dict.fromkeys("abcd", "data_parallel"), stored=("b",))
    with pytest.raises(
        ValueError,
        match=r"placement of table tables\.embedding_bags\.b must not be data_parallel, since its "
        "rows live outside the device",
    ):
        case.plan(2)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sharded_equals_unsharded_on_the_device(num_ranks: int) -> None:
    """Rows and states, bit for bit: pooled and sequences, jagged and fixed, weighted and means,
    beside static and dynamic tables on the device."""
    results = run_on_ranks(num_ranks, train_sharded, CASES)
    for number, case in enumerate(CASES):
        of_ranks = [rank_results[number] for rank_results in results]
        on_device = dataclasses.replace(case, stored=(), planned=())
        assert_equal_training(case, of_ranks, train_unsharded(on_device, num_ranks))


def modules_on_rank(storage: HostMemory | None) -> list[Any]:
    """On a rank: the losses and the rows of each module by a loop, eager and captured steps; the
    modules have the storage in one case, and the plan in the others."""
    found, rank = [], dist.get_rank()
    placements = {f"tables.{number}": placement for number, placement in enumerate(PLACEMENTS)}
    for capture in (None, False, True):
        is_planned = capture is not None
        model = StoredModules(None if is_planned else storage)
        plan = make_plan(table_specs(model), NUM_RANKS, placements)
        if is_planned:
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
        for module in model.tables:
            module.write_back()
        weights = [module.weight for module in model.tables]
        found.append((losses, [None if w is None else w.detach().numpy() for w in weights]))
    return found


def test_sharded_modules_equal_those_on_the_device() -> None:
    """With a cache that holds the rows of one batch of both ranks."""
    num_rows = largest_batch(batches(NUM_STEPS * NUM_RANKS))
    storage = HostMemory(cache_rows=num_rows + 2)
    on_device = run_on_ranks(NUM_RANKS, modules_on_rank, None)
    in_host_memory = run_on_ranks(NUM_RANKS, modules_on_rank, storage)
    for expected, found in zip(on_device, in_host_memory, strict=True):
        for (losses, weights), (own_losses, own_weights) in zip(expected, found, strict=True):
            assert own_losses == losses
            for weight, own in zip(weights, own_weights, strict=True):
                np.testing.assert_array_equal(own, weight)
