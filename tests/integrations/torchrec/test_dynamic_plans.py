"""TorchRec's planner places dynamic tables where they can be, and counts what they take."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.clicks import import_torchrec
from torchembed import LFU, Dynamic, MinimumCount
from torchembed.tables import HashFactory, Normal

CAPACITY = 2 * 4096
"""Has as many rows, whole or on two ranks."""


def collection(*, capacity: int = CAPACITY, dynamic: Dynamic | None, is_static_beside: bool) -> Any:
    torchrec = import_torchrec()
    from torchembed.integrations.torchrec import EmbeddingBagConfig

    configs = [
        EmbeddingBagConfig(
            name="item",
            num_embeddings=capacity,
            embedding_dim=16,
            feature_names=["item"],
            dynamic=dynamic,
        )
    ]
    if is_static_beside:
        configs += [
            EmbeddingBagConfig(
                name="day", num_embeddings=7, embedding_dim=16, feature_names=["day"]
            )
        ]
    return torch.nn.Sequential(
        torchrec.EmbeddingBagCollection(configs, device=torch.device("meta"))
    )


def options(model: Any, compute_device: str) -> dict[tuple[str, str, str], Any]:
    """By table, sharding type and compute kernel."""
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

    from torchembed.integrations.torchrec import get_default_sharders

    topology = Topology(world_size=2, compute_device=compute_device)
    found = EmbeddingEnumerator(topology, batch_size=64).enumerate(model, get_default_sharders())
    return {(o.name, o.sharding_type, o.compute_kernel): o for o in found}


@pytest.mark.parametrize("compute_device", ["cpu", "cuda"])
def test_the_planner_counts_ids_and_filters(compute_device: str) -> None:
    dynamic = Dynamic(eviction=LFU(), admission=MinimumCount(2, capacity=1000))
    of_dynamic = options(collection(dynamic=dynamic, is_static_beside=True), compute_device)
    of_static = options(collection(dynamic=None, is_static_beside=True), compute_device)
    found = {key[1:]: option for key, option in of_dynamic.items() if key[0] == "item"}
    kinds = {"table_wise", "column_wise", "table_column_wise"}
    if compute_device == "cuda":
        kinds |= {"row_wise", "table_row_wise"}
    assert set(found) == {(kind, "fused") for kind in kinds}
    for kind, option in found.items():
        other = of_static["item", *kind]
        for shard, static in zip(option.shards, other.shards, strict=True):
            assert (shard.size, shard.offset) == (static.size, static.offset)
            more = shard.storage - static.storage
            bytes_of_index = HashFactory(dynamic).bytes_for(shard.size[0])
            assert (more.hbm or more.ddr, more.hbm * more.ddr) == (bytes_of_index, 0)
            assert shard.perf.total == static.perf.total
    # Options of other tables are as they were.
    day = {key: o.total_storage for key, o in of_dynamic.items() if key[0] == "day"}
    assert day == {key: o.total_storage for key, o in of_static.items() if key[0] == "day"}
    assert ("day", "data_parallel", "dense") in day


def test_shards_have_whole_buckets() -> None:
    found = options(collection(capacity=1001, dynamic=Dynamic(), is_static_beside=False), "cuda")
    sizes = {kind: [shard.size[0] for shard in o.shards] for (_, kind, _), o in found.items()}
    rows_for = HashFactory(Dynamic()).rows_for
    assert sizes["table_wise"] == [rows_for(1001)] > [1001]
    assert sizes["row_wise"] == [rows_for(501)] * 2
    offsets = [shard.offset[0] for shard in found["item", "row_wise", "fused"].shards]
    assert offsets == [0, rows_for(501)]


def plan_of(model: Any, sharders: list[Any], **settings: Any) -> Any:
    """That of TorchRec's planner for two ranks."""
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=2, compute_device="cpu"),
        storage_reservation=FixedPercentageStorageReservation(0.1),
        **settings,
    )
    return planner.plan(model, sharders)


def test_a_small_dynamic_table_is_not_replicated() -> None:
    model = collection(capacity=4, dynamic=Dynamic(), is_static_beside=False)
    from torchembed.integrations.torchrec import get_default_sharders

    plan = plan_of(model, get_default_sharders())
    assert plan.plan["0"]["item"].sharding_type != "data_parallel"


def plan_replicated() -> None:
    from torchrec.distributed.planner import ParameterConstraints

    from torchembed.integrations.torchrec import get_default_sharders

    constraints = {"item": ParameterConstraints(sharding_types=["data_parallel"])}
    model = collection(dynamic=Dynamic(), is_static_beside=False)
    plan_of(model, get_default_sharders(), constraints=constraints)


def plan_for_torchrec() -> None:
    from torchrec.distributed.sharding_plan import get_default_sharders

    plan_of(collection(dynamic=Dynamic(), is_static_beside=False), get_default_sharders())


def config(**arguments: Any) -> Any:
    from torchembed.integrations.torchrec import EmbeddingBagConfig

    return EmbeddingBagConfig(
        name="item", num_embeddings=8, embedding_dim=4, feature_names=["item"], **arguments
    )


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (plan_replicated, ValueError, "dynamic table item must have one of the sharding types"),
        (
            plan_for_torchrec,
            TypeError,
            r"dynamic table item must be sharded by torchembed.*install",
        ),
        (lambda: config(dynamic="lru"), TypeError, "dynamic of table item must be a Dynamic"),
        (
            lambda: config(dynamic=Dynamic(), init_fn=torch.nn.init.normal_),
            TypeError,
            "initializer of table item must be Uniform, Normal or Constant",
        ),
        (
            lambda: config(initializer=Normal()),
            ValueError,
            "initializer of table item must be None unless",
        ),
        (
            lambda: config(dynamic=Dynamic(initial_capacity=4)),
            ValueError,
            "initial_capacity of dynamic table item must be None under TorchRec.*got 4",
        ),
        (
            lambda: config(dynamic=Dynamic(max_rows=4)),
            ValueError,
            "max_rows and max_bytes of dynamic table item must be None .*got 4 and None",
        ),
    ],
)
def test_refused(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    import_torchrec()
    with pytest.raises(error, match=message):
        make()
