"""Plans that the planner makes: complete, within memory, as constrained, the same again, best."""

import dataclasses
import math
import re

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tests.support.planning import (
    cost_model,
    every_plan,
    make_topology,
    make_use,
    planners,
    table_uses_strategy,
)
from torchembed import optim
from torchembed.sharding import (
    Placement,
    Planner,
    ShardingPlan,
    TableConstraint,
    TablePlan,
    TableUse,
    Topology,
)
from torchembed.sharding.planning.plan import place_table
from torchembed.sharding.planning.plan_report import report_plan

HOTNESS = {"f0": 1, "f1": 0.5, "f2": 20, "f3": 100}


def with_hotness(planner: Planner, tables: dict[str, TableUse]) -> Planner:
    used = {feature for use in tables.values() for feature in use.features}
    return dataclasses.replace(
        planner, hotness={name: count for name, count in HOTNESS.items() if name in used}
    )


def assert_complete(plan: TablePlan, use: TableUse, num_ranks: int) -> None:
    """Every element is on one rank, or all on each rank."""
    held = torch.zeros(use.spec.num_rows, use.spec.dim, dtype=torch.int32)
    for shard in plan.shards:
        rows = slice(shard.first_row, shard.first_row + shard.num_rows)
        held[rows, shard.first_column : shard.first_column + shard.num_columns] += 1
    replicas = num_ranks if plan.placement is Placement.DATA_PARALLEL else 1
    assert bool((held == replicas).all())
    ranks = [shard.rank for shard in plan.shards]
    assert ranks == sorted(set(ranks))


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    tables=table_uses_strategy(max_tables=8, max_rows=2000),
    planner=planners,
    num_nodes=st.integers(1, 3),
    ranks_per_node=st.integers(1, 4),
    memory_bytes=st.sampled_from((10**5, 10**6, 10**9)),
)
def test_plans_are_complete_fit_and_come_out_again(
    tables: dict[str, TableUse],
    planner: Planner,
    num_nodes: int,
    ranks_per_node: int,
    memory_bytes: int,
) -> None:
    planner = with_hotness(planner, tables)
    topology = make_topology(num_nodes, ranks_per_node, memory_bytes)
    report, message = None, ""
    try:
        report = planner.plan(tables, topology)
    except ValueError as error:
        message = str(error)
    if report is None:
        assert message.startswith("tables do not fit: in the best plan found rank ")
        return
    plan = report.plan
    assert (plan.num_ranks, plan.num_nodes) == (topology.num_ranks, num_nodes)
    assert [table.table for table in plan.tables] == list(tables)
    for table in plan.tables:
        use = tables[table.table]
        assert_complete(table, use, topology.num_ranks)
        if table.placement is Placement.DATA_PARALLEL:
            assert use.pooled
            assert use.spec.num_rows < planner.batch_size
    assert max(rank.held_bytes for rank in report.ranks) <= memory_bytes
    assert ShardingPlan.from_json(plan.to_json()) == plan
    assert planner.plan(tables, topology) == report
    assert report.balance >= 1
    # Each table alone takes less than all together, and all no longer than one after the other.
    assert max(table.seconds for table in report.tables) <= report.seconds * (1 + 1e-9)
    assert report.seconds <= sum(table.seconds for table in report.tables) * (1 + 1e-9)


@hypothesis.settings(max_examples=100)
@hypothesis.given(
    tables=table_uses_strategy(max_tables=2, max_rows=5000),
    planner=planners,
    nodes=st.sampled_from(((1, 2), (1, 3), (2, 2))),
    memory_bytes=st.sampled_from((2 * 10**5, 10**9)),
)
def test_no_plan_is_much_faster(
    tables: dict[str, TableUse], planner: Planner, nodes: tuple[int, int], memory_bytes: int
) -> None:
    """Against all plans of small models. The search is no proof: within a tenth of the best."""
    planner = with_hotness(planner, tables)
    topology = make_topology(*nodes, memory_bytes)
    fitting = [
        report.seconds
        for report in every_plan(planner, tables, topology)
        if max(rank.held_bytes for rank in report.ranks) <= memory_bytes
    ]
    if not fitting:
        with pytest.raises(ValueError, match="tables do not fit"):
            planner.plan(tables, topology)
        return
    assert planner.plan(tables, topology).seconds <= 1.1 * min(fitting)


def test_parts_go_to_different_nodes_whose_links_they_would_share() -> None:
    tables = {"t": make_use(1, 8, "f", "g")}
    planner = Planner(
        batch_size=1, hotness={"f": 20, "g": 100}, optimizer=optim.SGD, fixed_hotness=False
    )
    (plan,) = planner.plan(tables, make_topology(2, 2)).plan.tables
    assert plan.placement is Placement.COLUMN_WISE
    assert [shard.rank // 2 for shard in plan.shards] == [0, 1]


def test_hot_tables_are_split_and_small_ones_replicated() -> None:
    tables = {
        "hot": make_use(10**6, 64, "hot"),
        **{f"t{number}": make_use(10**5, 64, f"f{number}") for number in range(8)},
        "small": make_use(5, 64, "small"),
        "small sequence": make_use(5, 64, "small", pooled=False),
    }
    planner = Planner(batch_size=64, hotness={"hot": 50})
    report = planner.plan(tables, make_topology(1, 4))
    by_name = {table.table: table for table in report.plan.tables}
    assert len(by_name["hot"].shards) > 1
    assert by_name["small"].placement is Placement.DATA_PARALLEL
    assert by_name["small sequence"].placement is not Placement.DATA_PARALLEL
    assert report.balance < 1.05


def test_a_width_of_its_own_has_to_pay() -> None:
    """One of three like tables on two ranks is divided into columns where kernels start fast."""
    tables = {f"t{number}": make_use(10**5, 8, f"f{number}") for number in range(3)}
    planner = Planner(batch_size=64, placements=("table_wise", "column_wise"))
    topology = make_topology(1, 2)
    report = planner.plan(tables, topology)
    assert sorted(len(table.shards) for table in report.plan.tables) == [1, 1, 2]
    slow = planner.plan(tables, dataclasses.replace(topology, kernel_seconds=report.seconds / 4))
    assert [len(table.shards) for table in slow.plan.tables] == [1, 1, 1]


def test_replicas_are_dropped_where_they_do_not_pay() -> None:
    """A step looks up 2 rows of 999; reducing all of them takes longer."""
    tables = {"t": make_use(999, 64, "f")}
    planner = Planner(batch_size=1000, hotness={"f": 0.002})
    report = planner.plan(tables, make_topology(1, 2))
    replicated = dataclasses.replace(planner, placements=("data_parallel",))
    assert report.plan.tables[0].placement is not Placement.DATA_PARALLEL
    assert report.seconds < replicated.plan(tables, make_topology(1, 2)).seconds


def test_max_imbalance_goes_before_time() -> None:
    tables = {"hot": make_use(10**5, 8, "hot"), "cold": make_use(10**5, 8, "cold")}
    planner = Planner(batch_size=64, hotness={"hot": 20})
    topology = make_topology(4, 2)
    fastest = planner.plan(tables, topology)
    even = dataclasses.replace(planner, max_imbalance=1.05).plan(tables, topology)
    assert even.balance <= 1.05 < fastest.balance
    assert fastest.seconds <= even.seconds


def test_constraints_are_held() -> None:
    tables = {f"t{number}": make_use(1000, 24, "f") for number in range(7)}
    exact = place_table("t4", tables["t4"].spec, Placement.COLUMN_WISE, (0, 3))
    constraints = {
        "t0": TableConstraint(placements=("row_wise",)),
        "t1": TableConstraint(placements=(Placement.COLUMN_WISE,), num_shards=5),
        "t2": TableConstraint(ranks=(2,)),
        "t3": TableConstraint(nodes=(1,), placements=("table_row_wise",)),
        "t4": TableConstraint(exact=exact),
        "t5": TableConstraint(placements=("data_parallel",)),
        "t6": TableConstraint(nodes=(1,), ranks=(2, 3, 5), num_shards=2),
    }
    topology = make_topology(2, 3)
    plan = Planner(batch_size=8, constraints=constraints).plan(tables, topology).plan
    for name, use in tables.items():
        assert_complete(plan.table(name), use, 6)
    placed = {
        table.table: (table.placement, [shard.rank for shard in table.shards])
        for table in plan.tables
    }
    assert placed["t0"] == (Placement.ROW_WISE, [0, 1, 2, 3, 4, 5])
    assert placed["t1"][0] is Placement.COLUMN_WISE
    assert len(placed["t1"][1]) == 5
    assert placed["t2"] == (Placement.TABLE_WISE, [2])
    assert placed["t3"] == (Placement.TABLE_ROW_WISE, [3, 4, 5])
    assert plan.table("t4") == exact
    assert placed["t5"] == (Placement.DATA_PARALLEL, [0, 1, 2, 3, 4, 5])
    assert placed["t6"] == (Placement.COLUMN_WISE, [3, 5])


@pytest.mark.parametrize(
    "constraint",
    [
        TableConstraint(placements=("column_wise",)),
        TableConstraint(
            exact=place_table("t", make_use(1000, 24, "f").spec, Placement.COLUMN_WISE, (0, 1))
        ),
    ],
)
def test_row_wise_adagrad_takes_columns_too(constraint: TableConstraint) -> None:
    planner = Planner(optimizer=optim.RowwiseAdagrad, constraints={"t": constraint})
    report = planner.plan({"t": make_use(1000, 24, "f")}, make_topology(2, 2))
    assert report.plan.tables[0].placement is Placement.COLUMN_WISE


def test_a_constraint_may_leave_nothing() -> None:
    """Node 1 consists of ranks 3 to 5, of which rank 3 alone is allowed: no two shards."""
    constraint = TableConstraint(nodes=(1,), ranks=(1, 2, 3), num_shards=2)
    planner = Planner(constraints={"t": constraint})
    with pytest.raises(ValueError, match="constraint of table t leaves no placement: "):
        planner.plan({"t": make_use(1000, 24, "f")}, make_topology(2, 3))


def test_any_plan_can_be_costed() -> None:
    """What a report says of a plan does not depend on who made it."""
    tables = {"t": make_use(100, 8, "f"), "u": make_use(50, 8, "g")}
    topology, planner = make_topology(1, 2), Planner(batch_size=8)
    report = planner.plan(tables, topology)
    assert report_plan(report.plan, tables, cost_model(planner, topology)) == report


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size must be positive, got 0"),
        ({"hotness": {"f": -1}}, "hotness of f must not be negative, got -1"),
        ({"hotness": {"f": math.inf}}, "hotness of f must be finite, got inf"),
        (
            {"batch_size": 8, "hotness": {"f": 2}, "distinct_ids": {"f": 17}},
            "distinct_ids of f must be positive and at most the 16 ids that batch_size and",
        ),
        ({"distinct_ids": {"f": 0}}, "distinct_ids of f must be positive and at most the 1024"),
        ({"max_imbalance": 0.9}, "max_imbalance must be at least 1, got 0.9"),
        ({"placements": ()}, "placements must name at least one, got none"),
        ({"placements": ("x",)}, "placement of table (any) must be one of 'data_parallel'"),
    ],
)
def test_bad_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Planner(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 2.5}, "batch_size must be an int, got 2.5"),
        ({"batch_size": True}, "batch_size must be an int, got True"),
        ({"autocast": "bfloat16"}, "autocast must be a dtype, as torch.bfloat16, or None, got 'bf"),
        (
            {"optimizer": torch.optim.Adam},
            "optimizer must be the class of an optimizer of tables, as torchembed.optim.Adagrad",
        ),
    ],
)
def test_settings_of_other_types_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        Planner(**settings)


SPEC = make_use(1000, 24, "f").spec


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"constraints": {"u": TableConstraint()}},
            "constraints name tables ['u'], which the model lacks; it has ['t']",
        ),
        (
            {"hotness": {"g": 1}},
            "hotness names features ['g'], which no table has; they have ['f']",
        ),
        (
            {"distinct_ids": {"g": 1}},
            "distinct_ids names features ['g'], which no table has; they have ['f']",
        ),
        (
            {"constraints": {"t": TableConstraint(ranks=(0, 4))}},
            "ranks of the constraint of table t must be in [0, 4), got [0, 4]",
        ),
        (
            {"constraints": {"t": TableConstraint(nodes=(2,))}},
            "nodes of the constraint of table t must be in [0, 2), got [2]",
        ),
        (
            {"constraints": {"t": TableConstraint(placements=("column",))}},
            "placement of table t must be one of 'data_parallel'",
        ),
        (
            {
                "constraints": {
                    "t": TableConstraint(
                        exact=place_table("t", SPEC, Placement.COLUMN_WISE, (0, 4))
                    )
                }
            },
            "exact ranks of table t must be different and in [0, 4), got [0, 4]",
        ),
        (
            {
                "constraints": {
                    "t": TableConstraint(exact=place_table("u", SPEC, Placement.TABLE_WISE, (0,)))
                }
            },
            "exact of the constraint of table t must hold that table as place_table divides",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Planner(**settings).plan({"t": make_use(1000, 24, "f")}, make_topology(2, 2))


def test_bad_constraints_and_topologies_are_refused() -> None:
    exact = place_table("t", SPEC, Placement.TABLE_WISE, (0,))
    with pytest.raises(ValueError, match="exact says all of a constraint; leave out its other"):
        TableConstraint(exact=exact, ranks=(0,))
    with pytest.raises(
        TypeError, match=r"to TableConstraint\(\.\.\.\), got 'row_wise' for t; allow placements by"
    ):
        Planner(constraints={"t": "row_wise"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="num_shards must be positive, got 0"):
        TableConstraint(num_shards=0)
    with pytest.raises(
        TypeError, match=r"must be a Hardware, as torchembed\.sharding\.H200, got 'H1"
    ):
        Topology.of_hardware("H100", ranks_per_node=8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="memory_bytes of a topology must be positive, got 0"):
        make_topology(1, 2, memory_bytes=0)
    with pytest.raises(ValueError, match="topology must be given where the planner has none"):
        Planner().plan({"t": make_use(1000, 24, "f")})


def test_the_planner_s_own_topology_counts() -> None:
    topology: Topology = make_topology(1, 2)
    tables = {"t": make_use(1000, 24, "f")}
    assert Planner(topology=topology).plan(tables) == Planner().plan(tables, topology)
