"""TorchRec's planner counts what tables in host memory take, and their caches on the device."""

import math
import warnings
from typing import Any

import pytest
import torch

from tests.support.clicks import import_torchrec
from torchembed.core.types import OptimizerKind
from torchembed.ops.rowwise_update import UpdateRule
from torchembed.tables import HostMemory, Table, TableSpec, TieredGroup
from torchembed.tables.tiers import host_tensor

NUM_ROWS, DIM, LOAD_FACTOR = 10_000, 16, 0.1
IN_HOST_MEMORY = ("fused_uvm", "fused_uvm_caching")


def model(optimizer: Any) -> Any:
    torchrec = import_torchrec()
    configs = [
        torchrec.EmbeddingBagConfig(
            name="item", num_embeddings=NUM_ROWS, embedding_dim=DIM, feature_names=["item"]
        )
    ]
    made = torch.nn.Sequential(
        torchrec.EmbeddingBagCollection(configs, device=torch.device("meta"))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(optimizer, made.parameters(), {"lr": 0.1})
    return made


def options(optimizer: Any, whose: str) -> dict[tuple[str, str], Any]:
    """By sharding type and compute kernel, for two GPUs."""
    from torchrec.distributed import sharding_plan
    from torchrec.distributed.planner import ParameterConstraints, Topology
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.types import CacheParams

    from torchembed.integrations import torchrec as ours

    if whose == "installed":
        ours.install()
    sharders = ours if whose == "ours" else sharding_plan
    try:
        found = EmbeddingEnumerator(
            Topology(world_size=2, compute_device="cuda"),
            batch_size=64,
            constraints={
                "item": ParameterConstraints(cache_params=CacheParams(load_factor=LOAD_FACTOR))
            },
        ).enumerate(model(optimizer), sharders.get_default_sharders())
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
    group = TieredGroup([Table(spec)], stored, device)
    group.set_rule(UpdateRule(kind=kind), 0.0)
    cache = group.cache._replace(hand=torch.empty(0), counters=torch.empty(0))
    # The last row of each is no slot's.
    slots = [tensor[:-1] for tensor in (group.weight, *group.states)]
    on_device = sum(tensor.nbytes for tensor in (*cache, *slots))
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
    plan = planner.plan(model(torch.optim.SGD), get_default_sharders())
    assert plan.plan["0"]["item"].compute_kernel in IN_HOST_MEMORY
