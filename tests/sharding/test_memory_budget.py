"""The uses that a rank's memory will have."""

import dataclasses

import pytest
import torch

from tests.support.planning import make_topology, make_use
from torchembed import LFU, CountMinSketch, Dynamic, MinimumCount, optim
from torchembed.ops.rowwise_update import UpdateRule
from torchembed.sharding import Planner, WireTransport, make_plan
from torchembed.sharding.planning.memory_budget import memory_budget
from torchembed.tables import HashFactory, IndexedTable

TABLES = {
    "t": make_use(1000, 16, "f"),
    "u": make_use(10, 8, "g", dtype=torch.bfloat16),
}
SPECS = {name: use.spec for name, use in TABLES.items()}


def test_of_a_planner_s_plan() -> None:
    planner = Planner(batch_size=4, optimizer=optim.Adagrad, placements=("table_wise",))
    report = planner.plan(TABLES, make_topology(1, 2))
    budgets = [
        memory_budget(report.plan, TABLES, rank, report=report, dense_bytes=512, free_bytes=10**6)
        for rank in range(2)
    ]
    assert sorted(budget.row_bytes for budget in budgets) == [10 * 8 * 2, 1000 * 16 * 4]
    assert sorted(budget.state_bytes for budget in budgets) == [10 * 8 * 4, 1000 * 16 * 4]
    for budget, cost in zip(budgets, report.ranks, strict=True):
        assert budget.needed_bytes == cost.held_bytes + 512
        budget.check()
    fullest = max(budgets, key=lambda budget: budget.row_bytes)
    assert str(fullest).startswith(f"rank {fullest.rank} will take ")
    assert " of 976.6 KiB free memory: 62.5 KiB of rows, 62.5 KiB of their optim" in str(fullest)
    assert str(fullest).endswith("512 B for the dense part's gradients and state")


def test_what_arrives_by_push_has_channels() -> None:
    planner = Planner(batch_size=4, placements=("table_wise",))
    plain, pushed = (
        planner.plan(TABLES, make_topology(1, 2), transport=transport)
        for transport in WireTransport
    )
    assert plain.plan == pushed.plan
    vectors = {"t": 4 * 16 * 4, "u": 4 * 8 * 4}  # of a rank's samples, of either table
    for before, after in zip(plain.ranks, pushed.ranks, strict=True):
        held = next(t.table for t in plain.plan.tables if t.shards[0].rank == before.rank)
        more = 7 * (sum(vectors.values()) + 2 * vectors[held])
        assert after.buffer_bytes - before.buffer_bytes == more


def test_of_another_plan_rows_and_the_dense_part_are_known() -> None:
    plan = make_plan(SPECS, 2, {"t": "row_wise", "u": "data_parallel"})
    budget = memory_budget(plan, TABLES, 1, report=None, dense_bytes=24, free_bytes=32184)
    assert budget.needed_bytes == 500 * 16 * 4 + 160 + 24
    budget.check()
    assert str(budget).endswith(", their optimizer state and exchange buffers not counted")
    less = memory_budget(plan, TABLES, 1, report=None, dense_bytes=25, free_bytes=32184)
    with pytest.raises(
        ValueError, match=r"tables do not fit: rank 1 will take .* of 31\.43 KiB free .*more ranks"
    ):
        less.check()


def test_ids_of_dynamic_tables_count() -> None:
    index = HashFactory(Dynamic())
    spec = dataclasses.replace(SPECS["t"], num_rows=1024, index=index)
    tables = {**TABLES, "t": dataclasses.replace(TABLES["t"], spec=spec)}
    plan = make_plan({**SPECS, "t": spec}, 2, {"t": "row_wise", "u": "table_wise"})
    planner = Planner(batch_size=4, optimizer=optim.Adagrad, placements=("row_wise",))
    report = planner.plan(tables, make_topology(1, 2))
    budget = memory_budget(plan, tables, 1, report=None, dense_bytes=0, free_bytes=10**6)
    assert budget.index_bytes == 512 * 17
    assert budget.needed_bytes == budget.row_bytes + 512 * 17
    assert ", 8.5 KiB of what finds rows," in str(budget)
    budget = memory_budget(report.plan, tables, 1, report=report, dense_bytes=0, free_bytes=10**6)
    assert budget.index_bytes == 512 * 17
    assert budget.needed_bytes == report.ranks[1].held_bytes
    assert budget.state_bytes == 512 * 16 * 4 + 5 * 8 * 4


@pytest.mark.parametrize(
    "admission",
    [MinimumCount(2), MinimumCount(2, capacity=1000), CountMinSketch(threshold=2, width=64)],
)
def test_what_chooses_new_ids_counts(admission: MinimumCount | CountMinSketch) -> None:
    """The bytes of the index that is then made, but for what a table has once."""
    factory = HashFactory(Dynamic(eviction=LFU(), admission=admission))
    contents = factory([IndexedTable(1, 0, 512, 0)], torch.device("cpu")).contents(0)
    held = sum(t.nbytes for name, t in contents.items() if t.numel() >= 64)
    assert factory.bytes_for(512) == held


def test_the_state_counts_where_the_optimizer_is_known() -> None:
    plan = make_plan(SPECS, 2, {"t": "row_wise", "u": "data_parallel"})
    row_bytes = 500 * 16 * 4 + 10 * 8 * 2
    for kind, state_bytes in {
        optim.SGD: 0,
        optim.Adagrad: (500 * 16 + 10 * 8) * 4,
        optim.RowwiseAdagrad: (500 + 10) * 4,
        optim.Adam: 2 * (500 * 16 + 10 * 8) * 4,
    }.items():
        budget = memory_budget(
            plan,
            TABLES,
            0,
            report=None,
            rule=UpdateRule(kind=kind.kind),
            dense_bytes=0,
            free_bytes=row_bytes + state_bytes,
        )
        assert budget.state_bytes == state_bytes
        budget.check()
        assert str(budget).endswith(", exchange buffers not counted")
        with pytest.raises(ValueError, match="tables do not fit: rank 0 will take"):
            dataclasses.replace(budget, free_bytes=row_bytes + state_bytes - 1).check()
