"""Tables in host memory in plans: as data and as text, and which of them planners place there."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from tests.support.planning import (
    assert_planned_within,
    cost_model,
    make_host_topology,
    make_stored_use,
    make_use,
)
from torchembed import (
    Dynamic,
    optim,
)
from torchembed.sharding import (
    H200,
    Host,
    Placement,
    Planner,
    ShardingPlan,
    TableConstraint,
    TableUse,
    Topology,
    make_plan,
)
from torchembed.sharding.planning.distinct_rows import expected_distinct
from torchembed.sharding.planning.memory_budget import memory_budget
from torchembed.sharding.planning.plan import place_table
from torchembed.sharding.planning.plan_report import report_plan
from torchembed.tables import Disk, HashFactory, HostMemory, Storage

LINE = 16 * 4 * 2
"""Bytes of a row of 16 columns with Adagrad's state."""


sizes = st.integers(1, 10**12)
storages = (
    st.builds(HostMemory, cache_rows=sizes)
    | st.builds(HostMemory, cache_bytes=sizes)
    | st.builds(
        lambda path, cached, more: Disk(path=path, host_rows=cached + more, cache_rows=cached),
        st.sampled_from(("/mnt/nvme", "somewhere")),
        sizes,
        st.integers(0, 10**12),
    )
    | st.builds(Disk, path=st.just("d"), host_bytes=sizes, cache_rows=sizes)
)


@hypothesis.given(storage=st.none() | storages)
def test_storages_come_back_from_json(storage: Storage | None) -> None:
    specs = {"t": make_stored_use(10, "f", storage=storage).spec, "u": make_use(5, 8, "g").spec}
    plan = make_plan(specs, 2)
    assert plan.table("t").storage == storage
    assert ShardingPlan.from_json(plan.to_json()) == plan
    data = json.loads(plan.to_json())
    for table in data["tables"]:
        assert (table["storage"] is None) == (storage is None or table["table"] == "u")
        if table["storage"] is None:
            del table["storage"]
    assert ShardingPlan.from_json(json.dumps(data)) == plan


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (3, "storage must be an object or null, got 3"),
        ({"cache_rows": 3}, "tier of storage must be 'host' or 'disk', got None"),
        ({"tier": "host", "rows": 1, "cache_rows": 1}, r"storage has no \['rows'\]"),
        ({"tier": "host", "cache_rows": 0}, "cache_rows must be positive, got 0"),
        ({"tier": "host", "path": "d", "cache_rows": 1}, r"storage has no \['path'\]"),
        ({"tier": "disk", "host_rows": 1, "cache_rows": 1}, "path of storage is missing"),
        (
            {"tier": "disk", "path": "d", "host_rows": 1, "cache_rows": 2},
            "host_rows must be at least cache_rows, ",
        ),
        ({"tier": ["disk"]}, r"tier of storage must be 'host' or 'disk', got \['disk'\]"),
    ],
)
def test_what_is_no_storage_is_refused(entries: Any, message: str) -> None:
    data = json.loads(make_plan({"t": make_use(10, 8, "f").spec}, 1).to_json())
    data["tables"][0]["storage"] = entries
    with pytest.raises(ValueError, match=f"text must be a plan .*, but {message}"):
        ShardingPlan.from_json(json.dumps(data))


def test_plans_name_tiers() -> None:
    storages = {
        "a": None,
        "b": HostMemory(cache_rows=1234),
        "c": HostMemory(cache_bytes=2048),
        "d": Disk(path=Path("/mnt/nvme"), host_rows=5000, cache_bytes=2048),
    }
    specs = {name: make_stored_use(10, "f", storage=s).spec for name, s in storages.items()}
    lines = str(make_plan(specs, 1)).splitlines()
    assert [re.split(r"  +", line)[-1] for line in lines] == [
        "storage",
        "device",
        "host, 1,234 rows cached",
        "host, 2,048 bytes cached",
        "disk /mnt/nvme, 5,000 rows in host, 2,048 bytes cached",
    ]
    assert "storage" not in str(make_plan({"a": specs["a"]}, 1))


def test_tables_that_grow_are_on_devices() -> None:
    grows = HashFactory(Dynamic(initial_capacity=1))
    use = make_use(grows.rows_for(20_000), 16, "f")
    spec = dataclasses.replace(use.spec, index=grows, storage=HostMemory(cache_rows=10))
    with pytest.raises(
        ValueError,
        match=r"^storage of table t must be None for a dynamic table with an initial_capacity, ",
    ):
        make_plan({"t": spec}, 1)
    use = dataclasses.replace(use, spec=dataclasses.replace(spec, storage=None))
    topology = make_host_topology(1, 1, 10**6, memory_bytes=10**9)
    with pytest.raises(ValueError, match="tables do not fit: "):
        Planner(batch_size=10).plan({"t": use}, topology)


def test_dynamic_tables_have_their_ids_on_the_device() -> None:
    index = HashFactory(Dynamic())
    num_rows = index.rows_for(20_000)
    use = make_use(num_rows, 16, "f")
    use = dataclasses.replace(use, spec=dataclasses.replace(use.spec, index=index))
    report = Planner(batch_size=10).plan(
        {"t": use}, make_host_topology(1, 1, 10**6, memory_bytes=10**9)
    )
    storage = report.plan.table("t").storage
    assert storage is not None and storage.cache_rows is not None
    (rank,) = report.ranks
    assert rank.weight_bytes == storage.cache_rows * (LINE + 18) + num_rows * (8 + 17)
    assert rank.host_bytes == num_rows * LINE
    budget = memory_budget(
        report.plan, {"t": use}, 0, report=report, dense_bytes=0, free_bytes=10**9
    )
    assert budget.needed_bytes == rank.held_bytes and budget.host_bytes == rank.host_bytes


def test_tables_keep_the_storage_of_their_configs() -> None:
    """And their costs are reported: a cache of 100 of 1000 rows holds one in ten of uniform ids."""
    tables = {
        "host": make_stored_use(1000, "f", storage=HostMemory(cache_rows=100)),
        "more": make_stored_use(1000, "g", storage=HostMemory(cache_bytes=250 * LINE)),
        "device": make_use(10, 16, "h"),
    }
    planner = Planner(batch_size=20, placements=("table_wise",))
    topology = make_host_topology(1, 1, 10**9, memory_bytes=10**9)
    report = planner.plan(tables, topology)
    assert [plan.storage for plan in report.plan.tables] == [
        use.spec.storage for use in tables.values()
    ]
    assert [cost.hit_rate for cost in report.tables] == [
        pytest.approx(0.1),
        pytest.approx(0.25),
        None,
    ]
    (rank,) = report.ranks
    assert rank.host_bytes == 2000 * LINE
    assert rank.weight_bytes == 350 * (LINE + 18) + 2000 * 8 + 10 * LINE
    touched = 1000 * -math.expm1(-20 / 1000)
    assert rank.fetch_seconds == pytest.approx((0.9 + 0.75) * touched * LINE / 26e9)
    text = str(report)
    assert "host, 100 rows cached     10.0%" in text
    assert "host, 32,000 bytes cached     25.0%" in text
    assert report_plan(report.plan, tables, cost_model(planner, topology)) == report


def skewed() -> tuple[dict[str, TableUse], Planner]:
    """Equal tables: one that is used most, one that is used less, one whose ids are few."""
    tables = {name: make_use(100_000, 16, name) for name in ("most", "less", "skewed")}
    planner = Planner(
        batch_size=100,
        hotness={"most": 40, "less": 2, "skewed": 40},
        distinct_ids={"skewed": 60},
        placements=("table_wise",),
    )
    return tables, planner


def test_what_misses_least_goes_to_the_host() -> None:
    tables, planner = skewed()
    whole = 100_000 * LINE
    topology = make_host_topology(1, 1, int(1.5 * whole), memory_bytes=3 * whole)
    report = planner.plan(tables, topology)
    on = {plan.table: plan.storage for plan in report.plan.tables}
    assert on["most"] is None
    for name in ("less", "skewed"):
        storage = on[name]
        assert isinstance(storage, HostMemory) and storage.cache_rows is not None
        model = cost_model(planner, topology)
        assert storage.cache_rows >= model.touched(tables[name], 2)
    assert report.ranks[0].held_bytes <= topology.memory_bytes
    # Of a table that all devices hold together nothing is taken from them.
    roomy = planner.plan(tables, make_host_topology(1, 4, int(1.5 * whole), memory_bytes=3 * whole))
    assert all(plan.storage is None for plan in roomy.plan.tables)


def test_each_cache_has_kernels_of_its_own() -> None:
    """Tables of one cache size share a group on a rank; of two sizes they do not."""
    topology = dataclasses.replace(
        make_host_topology(1, 1, 10**9, memory_bytes=10**9), kernel_seconds=1.0
    )
    seconds = []
    for sizes in ((100, 100), (100, 101)):
        tables = {
            f"t{number}": make_stored_use(1000, "f", storage=HostMemory(cache_rows=size))
            for number, size in enumerate(sizes)
        }
        (rank,) = Planner(batch_size=4).plan(tables, topology).ranks
        seconds.append(round(rank.lookup_seconds + rank.update_seconds, 1))
    assert seconds == [3.8, 7.6]


def test_ranks_of_a_node_share_its_memory() -> None:
    """What one host has room for once, its two ranks do not place there twice."""
    tables = {
        name: make_stored_use(100_000, name, storage=HostMemory(cache_rows=100))
        for name in ("a", "b")
    }
    planner = Planner(batch_size=10, placements=("table_wise",))
    whole = 100_000 * LINE
    one_node = make_host_topology(1, 2, 10**9, memory_bytes=whole)
    with pytest.raises(
        ValueError, match=r"Node 0 would need 24\.41 MiB of the memory of its host, and has 12\.21"
    ):
        planner.plan(tables, one_node)
    report = planner.plan(tables, make_host_topology(2, 1, 10**9, memory_bytes=whole))
    assert sorted(plan.shards[0].rank for plan in report.plan.tables) == [0, 1]
    enough = planner.plan(tables, make_host_topology(1, 2, 10**9, memory_bytes=2 * whole))
    assert sum(rank.host_bytes for rank in enough.ranks) == 2 * whole


def test_what_fits_nowhere_is_refused_with_all_sums() -> None:
    tables = {"t": make_use(10**7, 16, "t")}
    planner = Planner(batch_size=100)
    topology = make_host_topology(1, 2, 10**8, memory_bytes=2 * 10**8)
    with pytest.raises(ValueError, match="tables do not fit: in the best plan found") as error:
        planner.plan(tables, topology)
    assert (
        "Node 0 would need 1.192 GiB of the memory of its host, and has 190.7 MiB. All devices "
        "together have 190.7 MiB, all hosts 190.7 MiB. Rows and optimizer state of all tables take "
        "1.192 GiB, 610.4 MiB of it state, on 2 rank(s); the heaviest: t (1.192 GiB). Use more"
    ) in str(error.value)


def test_constraints_keep_tables_on_devices() -> None:
    tables, planner = skewed()
    whole = 100_000 * LINE
    topology = make_host_topology(1, 1, int(1.5 * whole), memory_bytes=3 * whole)
    exact = place_table("less", tables["less"].spec, Placement.TABLE_WISE, (0,))
    constrained = dataclasses.replace(planner, constraints={"less": TableConstraint(exact=exact)})
    plan = constrained.plan(tables, topology).plan
    assert plan.table("less") == exact
    assert plan.table("most").storage is not None
    in_host = dataclasses.replace(exact, storage=HostMemory(cache_rows=5000))
    constrained = dataclasses.replace(planner, constraints={"less": TableConstraint(exact=in_host)})
    assert constrained.plan(tables, topology).plan.table("less") == in_host


tables_anywhere = st.lists(
    st.builds(
        lambda rows, dim, feature, storage: make_stored_use(
            rows, feature, storage=storage, dim=dim
        ),
        st.integers(1, 20_000),
        st.sampled_from((4, 8, 24)),
        st.sampled_from(("f0", "f1")),
        st.none() | st.none() | st.builds(HostMemory, cache_rows=st.integers(1, 5000)),
    ),
    min_size=1,
    max_size=5,
).map(lambda uses: {f"t{number}": use for number, use in enumerate(uses)})


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    tables=tables_anywhere,
    num_nodes=st.integers(1, 2),
    ranks_per_node=st.integers(1, 3),
    memory_bytes=st.sampled_from((10**5, 5 * 10**5, 10**7)),
    host_bytes=st.sampled_from((0, 5 * 10**5, 10**7)),
    distinct_ids=st.sampled_from((None, 10)),
)
def test_no_plan_takes_more_than_there_is(
    tables: dict[str, TableUse],
    num_nodes: int,
    ranks_per_node: int,
    memory_bytes: int,
    host_bytes: int,
    distinct_ids: int | None,
) -> None:
    topology = make_host_topology(num_nodes, ranks_per_node, memory_bytes, memory_bytes=host_bytes)
    features = sorted({feature for use in tables.values() for feature in use.features})
    planner = Planner(
        batch_size=16,
        optimizer=optim.RowwiseAdagrad,
        distinct_ids={} if distinct_ids is None else dict.fromkeys(features, distinct_ids),
    )
    assert_planned_within(planner, tables, topology)


def test_working_sets_of_two_batches_are_cached() -> None:
    """Also where the devices have room for no more: fewer rows would be an error in a step."""
    tables, planner = skewed()
    topology = make_host_topology(1, 1, 10**7, memory_bytes=10**9)
    report = planner.plan(tables, topology)
    model = cost_model(planner, topology)
    for plan in report.plan.tables:
        storage = plan.storage
        if storage is not None:
            (feature,) = tables[plan.table].features
            num_ids = 100 * planner.hotness[feature]
            if feature != "skewed":
                expected = expected_distinct(100_000, [(2 * num_ids, 0.0)])
                assert model.touched(tables[plan.table], 2) == pytest.approx(expected)
            assert storage.cache_rows is not None
            assert storage.cache_rows >= model.touched(tables[plan.table], 2)


def test_real_machines_have_hosts() -> None:
    topology = Topology.of_hardware(H200, ranks_per_node=8, host=Host(memory_bytes=2 << 40))
    assert topology.host.memory_bytes == 2 << 40
    assert topology.host_bandwidth == 26e9
    assert not topology.devices_are_hosts
    assert Topology.of_hardware(H200, ranks_per_node=8).host.memory_bytes == 0
