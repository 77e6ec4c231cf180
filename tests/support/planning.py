"""Tables, topologies and planners for tests, and every plan that a planner may choose from."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import hypothesis.strategies as st
import torch

from torchembed import optim
from torchembed.data import MLPERF_HOTNESS, MLPERF_TABLE_SIZES
from torchembed.ops.rowwise_update import UpdateRule
from torchembed.sharding import (
    Host,
    NodeDisk,
    Planner,
    PlanReport,
    ShardingPlan,
    TableConstraint,
    TableUse,
    Topology,
    WirePrecision,
)
from torchembed.sharding.planning.costs import CostModel
from torchembed.sharding.planning.options import table_options
from torchembed.sharding.planning.plan import as_placement
from torchembed.sharding.planning.plan_report import report_plan
from torchembed.tables import Storage, TableSpec


def make_topology(num_nodes: int, ranks_per_node: int, memory_bytes: int = 10**12) -> Topology:
    """Slow wires between nodes, faster ones within."""
    return Topology(
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        memory_bytes=memory_bytes,
        memory_bandwidth=1e9,
        intra_node_bandwidth=1e8,
        inter_node_bandwidth=1e7,
    )


def make_use(
    num_rows: int, dim: int, *features: str, pooled: bool = True, dtype: torch.dtype = torch.float32
) -> TableUse:
    spec = TableSpec(name="t", num_rows=num_rows, dim=dim, dtype=dtype)
    return TableUse(spec=spec, features=features, pooled=pooled)


def make_stored_use(
    num_rows: int, *features: str, storage: Storage | None, dim: int = 16
) -> TableUse:
    """A float32 table whose rows are in ``storage``; None: on the device."""
    use = make_use(num_rows, dim, *features)
    return dataclasses.replace(use, spec=dataclasses.replace(use.spec, storage=storage))


def make_host_topology(
    num_nodes: int, ranks_per_node: int, memory_bytes: int, /, **host: Any
) -> Topology:
    """:func:`make_topology` with a ``host`` of each node."""
    topology = make_topology(num_nodes, ranks_per_node, memory_bytes)
    return dataclasses.replace(topology, host=Host(**host))


def make_tiered_topology(
    num_nodes: int,
    ranks_per_node: int,
    memory_bytes: int,
    *,
    host_bytes: int,
    disk_bytes: int,
    path: str | None = "/mnt/nvme",
) -> Topology:
    """:func:`make_host_topology` with a disk of each node, at ``path``."""
    topology = make_host_topology(num_nodes, ranks_per_node, memory_bytes, memory_bytes=host_bytes)
    capacity = None if path is None else disk_bytes
    disk = NodeDisk(path=path, capacity_bytes=capacity, bandwidth=1e8, line_seconds=1e-6)
    return dataclasses.replace(topology, disk=disk)


def dlrm_dcnv2() -> tuple[dict[str, TableUse], dict[str, float]]:
    """MLPerf's tables, bf16 vectors, and their hotness."""
    names = [f"cat_{number}" for number in range(len(MLPERF_TABLE_SIZES))]
    tables = {
        name: TableUse(
            spec=TableSpec(name=name, num_rows=num_rows, dim=128),
            features=(name,),
            output_dtype=torch.bfloat16,
        )
        for name, num_rows in zip(names, MLPERF_TABLE_SIZES, strict=True)
    }
    return tables, dict(zip(names, map(float, MLPERF_HOTNESS), strict=True))


def cost_model(
    planner: Planner, topology: Topology, wire: WirePrecision | None = None
) -> CostModel:
    return CostModel(
        topology=topology,
        batch_size=planner.batch_size,
        rule=UpdateRule(kind=planner.optimizer.kind),
        wire=wire or WirePrecision(),
        fixed_hotness=planner.fixed_hotness,
        hotness=planner.hotness,
        distinct_ids=planner.distinct_ids,
    )


def every_plan(
    planner: Planner, tables: Mapping[str, TableUse], topology: Topology
) -> Iterator[PlanReport]:
    """Each table's every option on every choice of ranks, with all of the others'."""
    model = cost_model(planner, topology)
    allowed = [as_placement("(any)", placement) for placement in planner.placements]
    choices = [
        [
            option.plan(name, use, ranks)
            for option in table_options(name, use, model, allowed, TableConstraint())
            for ranks in (
                map(tuple, option.groups)
                if option.groups
                else itertools.combinations(option.pool.tolist(), option.num_parts)
            )
        ]
        for name, use in tables.items()
    ]
    for plans in itertools.product(*choices):
        plan = ShardingPlan(
            num_ranks=topology.num_ranks, tables=plans, num_nodes=topology.num_nodes
        )
        yield report_plan(plan, tables, model)


def table_uses_strategy(max_tables: int, max_rows: int) -> st.SearchStrategy[dict[str, TableUse]]:
    """Tables ``t0``, ``t1``, ... of features ``f0`` to ``f3``, some of which share a table."""
    one = st.builds(
        make_use,
        st.integers(1, max_rows),
        st.sampled_from((2, 4, 8, 24)),
        st.sampled_from(("f0", "f1")),
        pooled=st.booleans(),
        dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    )
    shared = st.builds(make_use, st.integers(1, max_rows), st.just(8), st.just("f2"), st.just("f3"))
    tables = st.lists(one | shared, min_size=1, max_size=max_tables)
    return tables.map(lambda uses: {f"t{number}": use for number, use in enumerate(uses)})


planners = st.builds(
    Planner,
    batch_size=st.sampled_from((1, 16, 64)),
    hotness=st.just({}),
    optimizer=st.sampled_from((optim.SGD, optim.Adagrad, optim.RowwiseAdagrad, optim.Adam)),
    fixed_hotness=st.booleans(),
)


def assert_planned_within(
    planner: Planner, tables: Mapping[str, TableUse], topology: Topology
) -> None:
    """A plan takes no more than there is, keeps the storages that configs name, goes through JSON,
    and comes out again; or it is refused for lack of memory."""
    try:
        report = planner.plan(tables, topology)
    except ValueError as error:
        assert str(error).startswith("tables do not fit: in the best plan found rank ")  # noqa: PT017
        return
    per_node, disk_bytes = topology.ranks_per_node, topology.disk.capacity_bytes or 0
    for first in range(0, topology.num_ranks, per_node):
        ranks = report.ranks[first : first + per_node]
        assert max(rank.held_bytes for rank in ranks) <= topology.memory_bytes
        assert sum(rank.host_bytes for rank in ranks) <= topology.host.memory_bytes
        assert sum(rank.disk_bytes for rank in ranks) <= disk_bytes
    for plan in report.plan.tables:
        assert tables[plan.table].spec.storage in (None, plan.storage)
    assert ShardingPlan.from_json(report.plan.to_json()) == report.plan
    assert planner.plan(tables, topology) == report
