"""TorchRec's planner counts what tables in host memory and on disk take, and their caches on the
device."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.clicks import import_torchrec
from tests.support.torchrec_cases import optimize_in_backward
from torchembed.core.types import OptimizerKind
from torchembed.ops.rowwise_update import UpdateRule
from torchembed.sharding.planning.storage_costs import LINE_INDEX_BYTES
from torchembed.tables import (
    Disk,
    DiskGroup,
    HostGroup,
    HostMemory,
    Table,
    TableSet,
    TableSpec,
)
from torchembed.tables.tiers import host_tensor

NUM_ROWS, DIM, LOAD_FACTOR = 10_000, 16, 0.1
IN_HOST_MEMORY = ("fused_uvm", "fused_uvm_caching")


def model(optimizer: Any, num_rows: int = NUM_ROWS) -> Any:
    torchrec = import_torchrec()
    configs = [
        torchrec.EmbeddingBagConfig(
            name="item", num_embeddings=num_rows, embedding_dim=DIM, feature_names=["item"]
        )
    ]
    made = torch.nn.Sequential(
        torchrec.EmbeddingBagCollection(configs, device=torch.device("meta"))
    )
    if optimizer is not None:
        optimize_in_backward(made, optimizer, lr=0.1)
    return made


def options(
    optimizer: Any, whose: str, stats: Any = None, *, num_rows: int = NUM_ROWS, **on_disk: Any
) -> dict[tuple[str, str], Any]:
    """By sharding type and compute kernel, for two GPUs.

    Args:
        stats: of the cache.
        on_disk: settings of ``KeyValueParams``, with which tables may be on disk, too.
    """
    from torchrec.distributed import sharding_plan
    from torchrec.distributed.planner import ParameterConstraints, Topology
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.types import CacheParams, KeyValueParams

    from torchembed.integrations import torchrec as ours

    if whose == "installed":
        ours.install()
    sharders = ours if whose == "ours" else sharding_plan
    constraints = ParameterConstraints(
        cache_params=CacheParams(load_factor=LOAD_FACTOR, stats=stats)
    )
    if on_disk:
        constraints.compute_kernels = ["fused", "fused_uvm", "key_value"]
        constraints.key_value_params = KeyValueParams(**on_disk)
    try:
        found = EmbeddingEnumerator(
            Topology(world_size=2, compute_device="cuda"),
            batch_size=64,
            constraints={"item": constraints},
        ).enumerate(model(optimizer, num_rows), sharders.get_default_sharders())
    finally:
        ours.uninstall()
    return {(option.sharding_type, option.compute_kernel): option for option in found}


def device_bytes(kind: OptimizerKind, num_rows: int) -> tuple[int, int]:
    """Bytes that a table really takes on the device and in host memory, but for what does not grow
    with either."""
    storage = HostMemory(cache_rows=math.ceil(num_rows * LOAD_FACTOR))
    spec = TableSpec(name="item", num_rows=num_rows, dim=DIM, storage=storage)
    device = torch.device("cpu")
    stored = host_tensor((num_rows, DIM), torch.float32, device)
    group = HostGroup([Table(spec)], stored, device)
    group.set_rule(UpdateRule(kind=kind), 0.0)
    cache = group.cache._replace(hand=torch.empty(0), counters=torch.empty(0))
    # The last row of each is no slot's.
    slots = [tensor[:-1] for tensor in (group.weight, *group.states)]
    on_device = sum(tensor.nbytes for tensor in (*cache, *slots, group._row_places._place_of_row))
    return on_device, sum(t.nbytes for t in (group.stored_weight, *group.stored_states))


@pytest.mark.parametrize("whose", ["ours", "installed"])
@pytest.mark.parametrize("name", ["sgd", "adagrad", "row-wise adagrad"])
def test_estimates_are_what_tables_take(name: str, whose: str) -> None:
    import_torchrec()
    from torchrec.optim import RowWiseAdagrad

    optimizer, kind = {
        "sgd": (torch.optim.SGD, OptimizerKind.SGD),
        "adagrad": (torch.optim.Adagrad, OptimizerKind.ADAGRAD),
        "row-wise adagrad": (RowWiseAdagrad, OptimizerKind.ROWWISE_ADAGRAD),
    }[name]
    found, theirs = options(optimizer, whose), options(optimizer, "theirs")
    assert found.keys() == theirs.keys()
    for (sharding_type, kernel), option in found.items():
        other = theirs[sharding_type, kernel]
        for shard, of_theirs in zip(option.shards, other.shards, strict=True):
            assert shard.perf.total == of_theirs.perf.total
            if kernel not in IN_HOST_MEMORY:
                assert shard.storage == of_theirs.storage
                continue
            uncached = theirs[sharding_type, "fused_uvm"].shards[0].storage
            on_device, on_host = device_bytes(kind, shard.size[0])
            columns = shard.size[1] / DIM
            assert columns == 1.0
            assert shard.storage.hbm == uncached.hbm + on_device
            assert shard.storage.ddr == on_host


def test_tables_that_do_not_fit_go_to_host_memory() -> None:
    import_torchrec()
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

    from torchembed.integrations.torchrec import get_default_sharders

    on_device, _ = device_bytes(OptimizerKind.SGD, NUM_ROWS)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=2, compute_device="cuda", hbm_cap=on_device),
        batch_size=8,
        storage_reservation=FixedPercentageStorageReservation(0.0),
    )
    plan: Any = planner.plan(model(torch.optim.SGD), get_default_sharders())
    assert plan.plan["0"]["item"].compute_kernel in IN_HOST_MEMORY


class Stats:
    """Misses of a cache as ``CacheParams`` may have them."""

    expected_lookups, cacheability = 1.0, 0.5

    def expected_miss_rate(self, clf: float) -> float:
        return (1 - clf) ** 2


def disk_bytes(kind: OptimizerKind, storage: Disk, num_rows: int) -> tuple[int, int, int]:
    """Bytes that a table really takes on the device and in host memory, but for what does not grow
    with either and for what finds rows on disk, and those of all its rows."""
    spec = TableSpec(name="item", num_rows=num_rows, dim=DIM, storage=storage)
    stored = torch.empty(num_rows, DIM, device="meta")
    group = DiskGroup([Table(spec)], stored, torch.device("cpu"))
    TableSet.over([group])
    group.set_rule(UpdateRule(kind=kind), 0.0)
    nothing = torch.empty(0)
    caches = [c._replace(hand=nothing, counters=nothing) for c in (group.cache, group.host)]
    slots = [tensor[:-1] for tensor in (group.weight, *group.states)]
    on_device = sum(tensor.nbytes for cache in caches for tensor in cache)
    on_device += sum(tensor.nbytes for tensor in slots)
    return (
        on_device,
        sum(tensor.nbytes for tensor in group.lines.tensors),
        num_rows * group.line_bytes,
    )


@pytest.mark.parametrize(
    ("params", "in_cache", "in_host"),
    [
        ({"l2_cache_size": 0}, 1000, 2000),
        ({"l2_cache_size": 1}, 1000, 10_000),
        ({"max_l1_cache_size": 1}, 1000, 2000),  # of which they take less
    ],
)
@pytest.mark.parametrize("name", ["sgd", "row-wise adagrad", "none"])
def test_estimates_are_what_tables_on_disk_take(
    name: str, params: dict[str, int], in_cache: int, in_host: int, tmp_path: Path
) -> None:
    import_torchrec()
    pytest.importorskip("rocksdict")
    from torchrec.optim import RowWiseAdagrad

    optimizer, kind = {
        "sgd": (torch.optim.SGD, OptimizerKind.SGD),
        "row-wise adagrad": (RowWiseAdagrad, OptimizerKind.ROWWISE_ADAGRAD),
        "none": (None, OptimizerKind.ROWWISE_ADAGRAD),  # what such tables have by default
    }[name]
    found, theirs = options(optimizer, "ours", **params), options(optimizer, "theirs", **params)
    assert found.keys() == theirs.keys()
    by_kernel = [kernel for _, kernel in found]
    assert "key_value" in by_kernel
    for (sharding_type, kernel), option in found.items():
        if kernel != "key_value":
            continue
        uncached = theirs[sharding_type, "fused_uvm"].shards[0].storage
        for shard in option.shards:
            num_rows, num_columns = shard.size
            assert num_columns == DIM
            part = num_rows / NUM_ROWS
            storage = Disk(
                path=tmp_path / "rows",
                cache_rows=round(in_cache * part),
                host_rows=round(in_host * part),
            )
            on_device, in_memory, on_disk = disk_bytes(kind, storage, num_rows)
            assert shard.storage.hbm == uncached.hbm + on_device
            assert shard.storage.ddr == in_memory + num_rows * LINE_INDEX_BYTES
            assert shard.storage.ssd == on_disk


def test_the_bound_of_the_cache_is_of_rows_with_their_state() -> None:
    import_torchrec()
    big, small = (
        options(torch.optim.Adagrad, "ours", max_l1_cache_size=mib, num_rows=1_000_000)
        for mib in (2, 1)
    )
    of_type = ("table_wise", "key_value")
    (more,), (less,) = (found[of_type].shards for found in (big, small))
    num_rows = 2**20 // (2 * DIM * 4)
    assert more.storage.ddr - less.storage.ddr == 2 * num_rows * 2 * DIM * 4
    # Of each slot of the cache, and of the two places in host memory that it brings with it.
    assert more.storage.hbm - less.storage.hbm == num_rows * (2 * DIM * 4 + 18 + 2 * 18)


@pytest.mark.parametrize("stats", [None, Stats()])
def test_time_is_of_where_rows_are_found(stats: Any) -> None:
    import_torchrec()
    found = options(torch.optim.SGD, "ours", stats, max_l1_cache_size=1)
    theirs = options(torch.optim.SGD, "theirs", stats, max_l1_cache_size=1)
    hits = [1 - (1 - part) ** 2 if stats else part for part in (0.1, 0.2)]
    parts = (hits[0], hits[1] - hits[0], 1 - hits[1])
    sharding_types = {kind for kind, kernel in found if kernel == "key_value"}
    assert {"table_wise", "row_wise"} <= sharding_types
    for kind in sharding_types:
        option = found[kind, "key_value"]
        for number, shard in enumerate(option.shards):
            others = [
                theirs[kind, kernel].shards[number].perf
                for kernel in ("fused", "fused_uvm", "key_value")
            ]
            for name in ("fwd_compute", "bwd_compute"):
                expected = sum(p * getattr(o, name) for p, o in zip(parts, others, strict=True))
                assert getattr(shard.perf, name) == pytest.approx(expected, rel=1e-9)
            assert shard.perf.fwd_comms == others[2].fwd_comms
            assert shard.perf.total < others[2].total
