"""What tables on disk cost: places in host memory, maps on the device, rows that neither holds."""

import dataclasses
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchembed
from tests.support.planning import (
    cost_model,
    make_stored_use,
    make_tiered_topology,
    make_use,
)
from torchembed import (
    Dynamic,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    SparseFeatures,
    optim,
)
from torchembed.core.row_caches import CacheCounter
from torchembed.modules import table_uses
from torchembed.ops.rowwise_update import UpdateRule
from torchembed.sharding import (
    H200,
    NodeDisk,
    Placement,
    Planner,
    ShardingPlan,
    Topology,
    make_plan,
)
from torchembed.sharding.planning.loads import Load
from torchembed.sharding.planning.memory_budget import memory_budget
from torchembed.sharding.planning.node_disk import DISK_SHARE
from torchembed.sharding.planning.plan import place_table
from torchembed.sharding.planning.plan_report import report_plan
from torchembed.sharding.planning.table_use import TableUse
from torchembed.tables import Disk, HashFactory, TableGroup
from torchembed.tables.tiers import DiskGroup

LINE = 16 * 4 * 2
"""Bytes of a row of 16 columns with Adagrad's state."""
DISK = Disk(path="d", host_rows=400, cache_rows=100)
TOPOLOGY = make_tiered_topology(1, 2, 10**9, host_bytes=10**9, disk_bytes=10**9)
TOUCHED = 1000 * -math.expm1(-20 / 1000)
"""Rows of 1000 that 20 uniform ids touch."""


def on_disk(storage: Disk = DISK) -> TableUse:
    return make_stored_use(1000, "f", storage=storage)


def test_a_table_on_disk_costs_both_caches_and_the_misses_of_both() -> None:
    model = cost_model(Planner(batch_size=10), TOPOLOGY)
    plan = place_table("t", on_disk().spec, Placement.TABLE_WISE, (1,))
    (load,), _ = model.table_loads(on_disk(), plan)
    on_device = place_table("t", make_use(1000, 16, "f").spec, Placement.TABLE_WISE, (1,))
    (without,), _ = model.table_loads(make_use(1000, 16, "f"), on_device)
    assert without[Load.HELD] - load[Load.HELD] == pytest.approx(
        1000 * LINE - (100 * (LINE + 18) + 400 * 18 + 8 * 1000)
    )
    assert load[Load.HOST] == 400 * LINE + 1000 * 6
    assert load[Load.FETCHED] == pytest.approx(0.9 * TOUCHED * LINE)
    assert load[Load.DISK] == 1000 * LINE
    # Each rank has half of the disk's rate, which moves 50 bytes in a microsecond.
    assert load[Load.READ] == pytest.approx(0.6 * TOUCHED * (LINE + 50))
    np.testing.assert_array_equal(load[: Load.HELD], without[: Load.HELD])
    assert model.disk_seconds(load[None])[0] == pytest.approx(
        0.6 * TOUCHED * (LINE / (1e8 / 2) + 1e-6)
    )
    fetched = 0.9 * TOUCHED * LINE / TOPOLOGY.host_bandwidth
    more = model.holder_seconds(load[None]) - model.holder_seconds(without[None])
    assert more[0] == pytest.approx(fetched + model.disk_seconds(load[None])[0])


@pytest.mark.parametrize("placement", ["row_wise", "column_wise"])
def test_each_rank_holds_rows_of_its_part(placement: str) -> None:
    model = cost_model(Planner(batch_size=10), TOPOLOGY)
    plan = place_table("t", on_disk().spec, Placement(placement), (0, 1))
    loads, _ = model.table_loads(on_disk(), plan)
    for load in loads:
        if placement == "row_wise":
            assert load[Load.HOST] == 400 * LINE + 500 * 6
            assert load[Load.DISK] == 500 * LINE
            assert load[Load.READ] == pytest.approx(0.2 * TOUCHED / 2 * (LINE + 50))
        else:
            assert load[Load.HOST] == 400 * LINE / 2 + 1000 * 6
            assert load[Load.DISK] == 1000 * LINE / 2
            assert load[Load.READ] == pytest.approx(0.6 * TOUCHED * (LINE / 2 + 50))


def test_reports_have_both_hit_rates() -> None:
    planner = Planner(batch_size=20, placements=("table_wise",))
    topology = dataclasses.replace(TOPOLOGY, ranks_per_node=1)
    tables = {
        "disk": on_disk(),
        "more": make_stored_use(
            1000, "g", storage=Disk(path="d", host_bytes=500 * LINE, cache_bytes=200 * LINE)
        ),
        "device": make_use(10, 16, "h"),
    }
    report = planner.plan(tables, topology)
    assert [cost.hit_rate for cost in report.tables] == [
        pytest.approx(0.1),
        pytest.approx(0.2),
        None,
    ]
    assert [cost.host_hit_rate for cost in report.tables] == [
        pytest.approx(0.4),
        pytest.approx(0.5),
        None,
    ]
    (rank,) = report.ranks
    assert rank.host_bytes == 900 * LINE + 2000 * 6
    assert rank.disk_bytes == 2000 * LINE
    assert rank.weight_bytes == 300 * (LINE + 18) + 900 * 18 + 2000 * 8 + 10 * LINE
    assert rank.disk_seconds == pytest.approx(1.1 * TOUCHED * (LINE / 1e8 + 1e-6))
    parts = (rank.lookup_seconds, rank.update_seconds, rank.fetch_seconds, rank.disk_seconds)
    assert rank.seconds == pytest.approx(sum(parts))
    text = str(report)
    assert "disk d, 400 rows in host, 100 rows cached     10.0%          40.0%" in text
    head = next(line for line in text.splitlines() if line.startswith("rank"))
    assert re.split("  +", head)[-3:] == ["fetch ms", "disk ms", "ms"]
    assert "disk" not in str(planner.plan({"device": tables["device"]}, topology))
    assert report_plan(report.plan, tables, cost_model(planner, topology)) == report


def test_on_cpus_host_rows_take_the_memory_of_ranks() -> None:
    topology = dataclasses.replace(TOPOLOGY, devices_are_hosts=True)
    model = cost_model(Planner(batch_size=10), topology)
    plan = place_table("t", on_disk().spec, Placement.TABLE_WISE, (0,))
    (load,), _ = model.table_loads(on_disk(), plan)
    assert load[Load.HOST] == load[Load.FETCHED] == 0
    assert load[Load.DISK] == 1000 * LINE
    assert load[Load.READ] > 0
    report = report_plan(ShardingPlan(num_ranks=2, tables=(plan,)), {"t": on_disk()}, model)
    held = 100 * (LINE + 18) + 400 * (LINE + 18) + 1000 * (8 + 6)
    assert report.ranks[0].weight_bytes == held


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_budgets_count_maps_and_places(is_dynamic: bool) -> None:
    """Two numbers of each row on the device, and of a dynamic one whether it is new."""
    use, num_rows = on_disk(), 1000
    if is_dynamic:
        index = HashFactory(Dynamic())
        num_rows = index.rows_for(1000)
        spec = dataclasses.replace(use.spec, index=index, num_rows=num_rows)
        use = dataclasses.replace(use, spec=spec)
    budget = memory_budget(
        make_plan({"t": use.spec}, 1),
        {"t": use},
        0,
        report=None,
        rule=UpdateRule(kind=optim.Adagrad.kind),
        dense_bytes=0,
        free_bytes=10**9,
    )
    assert budget.row_bytes == budget.state_bytes == 100 * LINE / 2
    of_ids = use.index_bytes(num_rows)
    maps = num_rows * (9 if is_dynamic else 8) + 500 * 18
    assert budget.index_bytes == maps + of_ids
    assert budget.host_bytes == 400 * LINE + num_rows * 6
    assert budget.disk_bytes == num_rows * LINE
    if not is_dynamic:
        assert str(budget).endswith("; and 55.86 KiB of its host; and 125 KiB of its disk at most")


@pytest.mark.parametrize("dynamic", [None, Dynamic()])
def test_the_memory_that_a_table_takes(dynamic: Dynamic | None, tmp_path: Path) -> None:
    """Budgets count what a real table takes, but for what each group has once."""
    config = EmbeddingBagConfig(
        name="t",
        num_embeddings=5000,
        embedding_dim=16,
        feature_names=("f",),
        dynamic=dynamic,
        storage=Disk(path=tmp_path, host_rows=900, cache_rows=300),
    )
    module = EmbeddingBagCollection([config])
    use = table_uses(torch.nn.ModuleDict({"bags": module}))["bags.embedding_bags.t"]
    optimizer = optim.Adagrad(module.parameters(), lr=0.1)
    module(SparseFeatures.from_dict({"f": [list(range(200))]})).values().sum().backward()
    optimizer.step()
    (group,) = module.table_set.groups
    assert isinstance(group, DiskGroup)
    found = [group.weight, *group.states, *group.cache, *group.host]
    if group._owners.are_new is not None:
        found.append(group._owners.are_new)
    budget = memory_budget(
        make_plan({"t": use.spec}, 1),
        {"t": use},
        0,
        report=None,
        rule=UpdateRule(kind=optim.Adagrad.kind),
        dense_bytes=0,
        free_bytes=10**9,
    )
    num_rows = use.spec.num_rows
    taken = sum(tensor.nbytes for tensor in found)
    assert 0 <= taken - (budget.needed_bytes - use.index_bytes(num_rows)) <= 512
    held = sum(tensor.nbytes for tensor in group.lines.tensors)
    assert budget.host_bytes == held + num_rows * 6


def test_tables_hit_as_often_as_predicted(tmp_path: Path) -> None:
    """Uniform ids hit within five standard deviations of as often as is predicted."""
    num_rows, num_ids, storage = 4000, 128, Disk(path=tmp_path, host_rows=1200, cache_rows=500)
    config = EmbeddingBagConfig(
        name="t", num_embeddings=num_rows, embedding_dim=4, feature_names=("f",), storage=storage
    )
    module = EmbeddingBagCollection([config])
    planner = Planner(batch_size=num_ids)
    report = torchembed.plan_embeddings(
        torch.nn.ModuleDict({"bags": module}),
        dataclasses.replace(planner, topology=dataclasses.replace(TOPOLOGY, ranks_per_node=1)),
    )
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    (group,) = module.table_set.groups
    generator = torch.Generator().manual_seed(0)
    before = []
    for step in range(160):
        if step == 60:  # both are full
            before = [counters_of(group, cache) for cache in ("cache", "host")]
        ids = torch.randint(num_rows, (num_ids,), generator=generator)
        batch = SparseFeatures(keys=("f",), values=ids, batch_size=num_ids, hotness=(1,))
        module(batch).values().sum().backward()
        optimizer.step()
    (cost,) = report.tables
    for cache, counted, predicted in zip(
        ("cache", "host"), before, (cost.hit_rate, cost.host_hit_rate), strict=True
    ):
        unique, misses = (counters_of(group, cache) - counted).tolist()
        assert predicted is not None
        deviation = math.sqrt(predicted * (1 - predicted) / unique)
        assert 1 - misses / unique == pytest.approx(predicted, abs=5 * deviation)


def counters_of(group: TableGroup, cache: str) -> torch.Tensor:
    """Rows of batches, and those that were not there, of the device's cache or of host memory."""
    assert isinstance(group, DiskGroup)
    counters = group.host.counters
    if cache == "cache":
        counters = group.cache.counters + group.counters.of_forwards
    return counters[[CacheCounter.UNIQUE_ROWS, CacheCounter.UNIQUE_MISSES]].clone()


def test_half_of_what_a_disk_has_free_is_for_rows(tmp_path: Path) -> None:
    assert NodeDisk().known() == NodeDisk()
    given = NodeDisk(path=tmp_path, capacity_bytes=7)
    assert given.known() is given
    for path in (tmp_path, tmp_path / "new"):
        before = shutil.disk_usage(tmp_path).free
        found = NodeDisk(path=path).known()
        after = shutil.disk_usage(tmp_path).free
        assert found.path == str(path) and found.capacity_bytes is not None
        low, high = sorted((before, after))
        slack = 1 << 30  # others write there, too
        assert low - slack <= found.capacity_bytes / DISK_SHARE <= high + slack
        assert not (tmp_path / "new").exists()
    with pytest.raises(
        FileNotFoundError,
        match=r"path of a disk must be a folder, or a new one in a folder that exists, got "
        r"'.*/b/c'; make '.*/b' on each node",
    ):
        NodeDisk(path=tmp_path / "b" / "c").known()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": ""}, "path of a disk must be a folder or None, got ''"),
        ({"path": 3}, "path of a disk must be a folder or None, got 3"),
        ({"path": "d", "capacity_bytes": -1}, "capacity_bytes of a disk must not be negative"),
        ({"bandwidth": 0}, "bandwidth of a disk must be positive, got 0"),
        ({"line_seconds": -1.0}, "line_seconds of a disk must not be negative, got -1.0"),
        (
            {"capacity_bytes": 5},
            "path of a disk must be given where capacity_bytes is, got 5 bytes; name the folder",
        ),
    ],
)
def test_bad_disks_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        NodeDisk(**settings)


def test_a_disk_is_said_once() -> None:
    with pytest.raises(ValueError, match=r"^disk must be None where topology is given, got NodeD"):
        Planner(topology=TOPOLOGY, disk=NodeDisk(path="d"))
    disk = NodeDisk(path="d", capacity_bytes=10)
    assert Topology.of_hardware(H200, ranks_per_node=8, disk=disk).disk_bandwidth == 1e9 / 8
    assert Topology.of_hardware(H200, ranks_per_node=8).disk == NodeDisk()
