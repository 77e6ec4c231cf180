"""What tables in host memory cost: rows that caches do not hold, the memory of hosts, links."""

import collections
import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from tests.support.planning import (
    cost_model,
    make_host_topology,
    make_stored_use,
    make_topology,
    make_use,
)
from torchembed.sharding import (
    CPU,
    Host,
    Placement,
    Planner,
    ShardingPlan,
    Topology,
)
from torchembed.sharding.planning.distinct_rows import expected_misses
from torchembed.sharding.planning.loads import Everywhere, Load
from torchembed.sharding.planning.plan import place_table
from torchembed.sharding.planning.plan_report import report_plan
from torchembed.tables import HostMemory

LINE = 16 * 4 * 2
"""Bytes of a row of 16 columns with Adagrad's state."""


@pytest.mark.parametrize("cached", [0, 100, 500, 999])
def test_of_uniform_ids_the_share_that_is_not_cached_is_missing(cached: int) -> None:
    touched = 1000 * -math.expm1(-300 / 1000)
    missing = expected_misses(1000, ((300.0, 0.0),), cached)
    assert missing == pytest.approx((1 - cached / 1000) * touched, rel=1e-9)
    assert expected_misses(1000, ((300.0, 0.0),), 1000) == 0


def test_skewed_ids_are_missing_as_in_a_cache_of_the_rows_used_last() -> None:
    """Against such a cache; its mean over batches is within three in a hundred."""
    num_rows, num_ids, num_cached, exponent = 5000, 200, 800, 1.1
    rows = np.arange(1.0, num_rows + 2)
    shares = np.diff((rows ** (1 - exponent) - 1) / (1 - exponent))
    generator = np.random.default_rng(0)
    cache: collections.OrderedDict[int, None] = collections.OrderedDict()
    missing = []
    for _ in range(600):
        batch = np.unique(generator.choice(num_rows, num_ids, p=shares / shares.sum()))
        missing.append(sum(row not in cache for row in batch.tolist()))
        for row in batch.tolist():
            cache[row] = None
            cache.move_to_end(row)
        while len(cache) > num_cached:
            cache.popitem(last=False)
    found = expected_misses(num_rows, ((float(num_ids), exponent),), num_cached)
    assert np.mean(missing[100:]) == pytest.approx(found, rel=0.03)


def test_a_table_in_the_host_costs_its_cache_and_its_misses() -> None:
    planner = Planner(batch_size=10)
    use = make_stored_use(1000, "f", storage=HostMemory(cache_rows=100))
    model = cost_model(planner, make_topology(1, 2))
    plan = place_table("t", use.spec, Placement.TABLE_WISE, (1,))
    assert plan.storage == HostMemory(cache_rows=100)
    (load,), _ = model.table_loads(use, plan)
    on_device = place_table("t", make_use(1000, 16, "f").spec, Placement.TABLE_WISE, (1,))
    (without,), _ = model.table_loads(use, on_device)
    assert without[Load.HELD] - load[Load.HELD] == pytest.approx(
        1000 * LINE - (100 * (LINE + 18) + 8 * 1000)
    )
    assert load[Load.HOST] == 1000 * LINE
    touched = 1000 * -math.expm1(-20 / 1000)
    assert load[Load.FETCHED] == pytest.approx(0.9 * touched * LINE)
    np.testing.assert_array_equal(load[: Load.HELD], without[: Load.HELD])


@pytest.mark.parametrize("placement", ["row_wise", "column_wise"])
def test_each_rank_caches_rows_of_its_part(placement: str) -> None:
    """Ranks that divide rows miss those of theirs, and ranks that divide columns miss the same."""
    planner = Planner(batch_size=10)
    use = make_stored_use(1000, "f", storage=HostMemory(cache_rows=100))
    model = cost_model(planner, make_topology(1, 2))
    loads, _ = model.table_loads(use, place_table("t", use.spec, Placement(placement), (0, 1)))
    touched = 1000 * -math.expm1(-20 / 1000)
    for load in loads:
        if placement == "row_wise":
            assert load[Load.HOST] == 500 * LINE
            assert load[Load.FETCHED] == pytest.approx(0.8 * touched / 2 * LINE)
        else:
            assert load[Load.HOST] == 1000 * LINE / 2
            assert load[Load.FETCHED] == pytest.approx(0.9 * touched * LINE / 2)


def test_time_on_links() -> None:
    topology = make_host_topology(2, 2, 10**9, access_bandwidth=100.0)
    model = cost_model(Planner(), topology)
    loads = np.zeros((4, len(Load)))
    loads[:, Load.FETCHED] = (200, 300, 0, 50)
    assert model.fetch_seconds(loads).tolist() == [2, 3, 0, 0.5]
    without = model.rank_seconds(np.zeros((4, len(Load))), Everywhere())
    assert (model.rank_seconds(loads, Everywhere()) - without).tolist() == [2, 3, 0, 0.5]
    assert model.holder_seconds(loads).tolist() == [2, 3, 0, 0.5]


def test_the_rate_of_the_host() -> None:
    def rate(ranks_per_node: int, **rates: float) -> float:
        return make_host_topology(1, ranks_per_node, 1, **rates).host_bandwidth

    assert [rate(n) for n in (1, 8, 32)] == [26e9, 26e9, 8e9]
    assert rate(1, link_bandwidth=10e9) == 10e9
    assert rate(2, node_bandwidth=60e9, access_bandwidth=50e9) == 30e9


def test_on_cpus_rows_in_the_host_take_the_memory_of_ranks() -> None:
    topology = dataclasses.replace(make_topology(1, 2), devices_are_hosts=True)
    use = make_stored_use(1000, "f", storage=HostMemory(cache_rows=100))
    model = cost_model(Planner(batch_size=10), topology)
    plan = place_table("t", use.spec, Placement.TABLE_WISE, (0,))
    (load,), _ = model.table_loads(use, plan)
    assert load[Load.HOST] == 0
    report = report_plan(ShardingPlan(num_ranks=2, tables=(plan,)), {"t": use}, model)
    assert report.ranks[0].weight_bytes == 1000 * LINE + 100 * (LINE + 18) + 8000
    assert Topology.of_hardware(CPU, ranks_per_node=1).devices_are_hosts


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory_bytes": -1}, "memory_bytes of a host must not be negative, got -1"),
        ({"link_bandwidth": 0}, "link_bandwidth of a host must be positive, got 0"),
    ],
)
def test_bad_hosts_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Host(**settings)
