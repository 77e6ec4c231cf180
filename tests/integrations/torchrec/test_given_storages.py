"""Tables whose config has a storage live there, and train as those on the device, bit for bit."""

import importlib.util
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.clicks import import_torchrec
from tests.support.torchrec_cases import optimize_in_backward
from tests.support.torchrec_tiers import (
    TABLES,
    differences,
    make,
    on_the_device,
    through_pipelines,
    trained,
)
from torchembed import Dynamic
from torchembed.core.types import OptimizerKind
from torchembed.ops.rowwise_update import UpdateRule
from torchembed.sharding.planning.storage_costs import held_rows
from torchembed.tables import Constant, Disk, HostMemory, Normal, Storage

PLACEMENTS = ["table_wise", "row_wise", "column_wise"]
KINDS = ("host memory", "disk")
NUM_ROWS, DIM = 10_000, 16


def storage(kind: str, folder: str) -> Storage:
    """One that holds no table of 1000 rows whole."""
    if kind == "disk":
        return Disk(path=f"{folder}/rows", host_rows=900, cache_rows=500)
    return HostMemory(cache_rows=500)


def planned(given: Storage) -> dict[str, Any]:
    """What TorchRec's planner for two ranks of CPUs makes of tables with and without a storage, and
    training by its plan."""
    import torchrec
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

    from torchembed.integrations import torchrec as ours

    bags = torchrec.EmbeddingBagCollection(
        [
            ours.EmbeddingBagConfig(
                name=name,
                num_embeddings=1000,
                embedding_dim=8,
                feature_names=[name],
                storage=given if name == "item" else None,
                initializer=Constant(value=2.0) if name == "item" else None,
            )
            for name in ("user", "item")
        ],
        device=torch.device("meta"),
    )
    optimize_in_backward(bags, torch.optim.SGD, lr=0.5)
    model, sharders = torch.nn.Sequential(bags), ours.get_default_sharders()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=2, compute_device="cpu"),
        storage_reservation=FixedPercentageStorageReservation(0.1),
    )
    plan: Any = planner.collective_plan(model, sharders, dist.group.WORLD)
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=sharders
    )
    features = torchrec.KeyedJaggedTensor(
        ["user", "item"], torch.tensor([1, 7]), lengths=torch.tensor([1, 1])
    )
    vectors = []
    for _ in range(2):
        found = sharded(features)["item"]
        vectors.append(found.tolist())
        found.sum().backward()
    return {"kernels": {n: p.compute_kernel for n, p in plan.plan["0"].items()}, "item": vectors}


def refused(folder: str) -> dict[str, str]:
    """Texts of errors."""
    given = storage("host memory", folder)
    found = {}
    for name, case in {
        "placement": {"placements": ["data_parallel"]},
        "kernel": {"kernels": {"a": "fused_uvm"}},
        "fallback": {"fused_params": {"gradient_clipping": True}},
    }.items():
        try:
            make(storages={"a": given}, **case)
        except ValueError as error:
            found[name] = str(error)
    try:
        make(storages=dict.fromkeys(TABLES, HostMemory(cache_rows=3))).steps(0, 1)
    except RuntimeError as error:
        found["too small"] = str(error)
    return found


def everything_on_the_cpu() -> dict[str, Any]:
    if importlib.util.find_spec("rocksdict") is None:
        return {}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as own:
        (folder,) = given = [own]
        dist.broadcast_object_list(given)
        (folder,) = given
        for kind in KINDS:
            storages = dict.fromkeys(("b", "c"), storage(kind, folder))
            for name, case in {"bags": {}, "sequences": {"is_sequence": True}}.items():
                placements = PLACEMENTS[: 2 if case else 3]
                expected, _ = on_the_device(trained, placements=placements, **case)
                results, counts = trained(placements=placements, storages=storages, **case)
                found[f"{kind}, {name}"] = differences(results, expected), counts
            found[f"{kind}, pipelines"] = through_pipelines(storages=storages)
        found["planned"] = planned(storage("disk", folder))
        found["refused"] = refused(folder)
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def ranks(cpu_answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    pytest.importorskip("rocksdict")
    return [answer["given_storages"] for answer in cpu_answers]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["bags", "sequences"])
def test_steps_equal_those_on_the_device(ranks: list[dict[str, Any]], name: str, kind: str) -> None:
    for rank in ranks:
        differing, counts = rank[f"{kind}, {name}"]
        assert differing == []
        assert counts["tiered"] > 0
        assert counts["on disk"] == (counts["tiered"] if kind == "disk" else 0)
    assert any(r[f"{kind}, {name}"][1]["slots"] < r[f"{kind}, {name}"][1]["rows"] for r in ranks)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["bags, eager", "bags, captured", "sequences, captured"])
def test_pipelines_equal_those_on_the_device(
    ranks: list[dict[str, Any]], name: str, kind: str
) -> None:
    for rank in ranks:
        differing, counts, lines = rank[f"{kind}, pipelines"][name]
        assert differing == []
        assert lines == []
        assert counts["tiered"] > 0


def test_planners_leave_such_tables_their_storage(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["planned"]
        assert found["kernels"]["item"] == "fused"
        # Both ranks have id 7, and TorchRec trains with the mean of their gradients.
        assert found["item"] == [[[2.0] * 8], [[1.5] * 8]]


def test_what_cannot_be_is_named(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["refused"]
        for name, reason in (
            ("placement", "sharding type data_parallel"),
            ("kernel", "compute kernel fused_uvm"),
        ):
            assert found[name].startswith("table a with a storage must have one of the sharding")
            assert f"compute kernel fused, got {reason}; give the planner" in found[name]
        assert found["fallback"] == (
            "tables with a storage a must be sharded by torchembed, which cannot shard their "
            "EmbeddingBagCollection, since table a: its fused_params have gradient_clipping = "
            "True; change that, or put the tables into a collection of their own"
        )
        assert re.search(r"share a cache of \d+ rows .* or cache_rows of their", found["too small"])


def config(**arguments: Any) -> Any:
    from torchembed.integrations.torchrec import EmbeddingBagConfig

    return EmbeddingBagConfig(
        name="item", num_embeddings=NUM_ROWS, embedding_dim=DIM, feature_names=["item"], **arguments
    )


def model(given: Storage | None) -> Any:
    torchrec = import_torchrec()
    made = torch.nn.Sequential(
        torchrec.EmbeddingBagCollection([config(storage=given)], device=torch.device("meta"))
    )
    optimize_in_backward(made, torch.optim.Adagrad, lr=0.1)
    return made


def options(given: Storage | None, compute_device: str = "cuda", *, of: str = "ours") -> Any:
    """By sharding type and compute kernel, for two ranks."""
    import_torchrec()
    from torchrec.distributed import sharding_plan
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

    from torchembed.integrations import torchrec as ours

    topology = Topology(world_size=2, compute_device=compute_device)
    sharders = (ours if of == "ours" else sharding_plan).get_default_sharders()
    found = EmbeddingEnumerator(topology, batch_size=64).enumerate(model(given), sharders)
    return {(o.sharding_type, o.compute_kernel): o for o in found}


@pytest.mark.parametrize(
    "given",
    [HostMemory(cache_rows=1000), Disk(path="rows", host_bytes=1 << 19, cache_bytes=1 << 17)],
)
def test_the_planner_counts_the_storage(given: Storage) -> None:
    found, others = options(given), options(None)
    assert {kernel for _, kernel in found} == {"fused"}
    assert {"table_wise", "row_wise", "column_wise"} <= {kind for kind, _ in found}
    assert "data_parallel" not in {kind for kind, _ in found}
    for (kind, _), option in found.items():
        in_host = others[kind, "fused_uvm"].shards
        on_device = others[kind, "fused"].shards
        for shard, uncached, fused in zip(option.shards, in_host, on_device, strict=True):
            num_rows, num_columns = shard.size
            rule = UpdateRule(kind=OptimizerKind.ADAGRAD)
            line_bytes = num_columns * 4 + rule.state_bytes(1, num_columns)
            held = held_rows(given, num_rows, line_bytes, is_rounded=False, takes_any_id=False)
            cached = held.on_device * line_bytes + held.index_bytes
            # TorchRec counts the buffers alone on the device for a table in host memory.
            of_buffers = fused.storage.hbm - 2 * num_rows * num_columns * 4
            assert shard.storage.hbm == of_buffers + cached
            assert shard.storage.ddr == held.in_host * line_bytes + held.host_index_bytes
            assert shard.storage.ssd == held.on_disk * line_bytes
            assert fused.perf.fwd_compute < shard.perf.fwd_compute
            if isinstance(given, HostMemory):
                part = 1000 / num_rows
                expected = part * fused.perf.bwd_compute + (1 - part) * uncached.perf.bwd_compute
                assert shard.perf.bwd_compute == pytest.approx(expected, rel=1e-9)


def test_estimates_for_ranks_of_cpus_stay() -> None:
    found = options(HostMemory(cache_rows=1000), "cpu")
    others = options(None, "cpu")
    assert found
    for kind, option in found.items():
        assert option.total_storage == others[kind].total_storage


@pytest.mark.parametrize(
    ("make_one", "error", "message"),
    [
        (lambda: config(storage="disk"), TypeError, r"storage of table item must be HostMemory"),
        (
            lambda: config(storage=HostMemory(cache_rows=1), dynamic=Dynamic()),
            ValueError,
            r"storage of dynamic table item must be None under TorchRec, got HostMemory\(",
        ),
        (
            lambda: config(
                storage=Disk(path="rows", host_rows=2, cache_rows=1), init_fn=torch.nn.init.zeros_
            ),
            TypeError,
            "initializer of table item must be Uniform, Normal or Constant, since rows on disk",
        ),
        (
            lambda: config(storage=HostMemory(cache_rows=1), initializer=Normal()),
            ValueError,
            "initializer of table item must be None unless the table is dynamic or on disk",
        ),
        (
            lambda: options(HostMemory(cache_rows=1), of="theirs"),
            TypeError,
            r"table item with a storage must be sharded by torchembed, got TorchRec's.*install",
        ),
    ],
)
def test_refused(make_one: Callable[[], Any], error: type[Exception], message: str) -> None:
    import_torchrec()
    with pytest.raises(error, match=message):
        make_one()


def test_a_config_is_the_same_table_in_torchembeds_collections(tmp_path: Path) -> None:
    import_torchrec()
    given = Disk(path=tmp_path, host_rows=2, cache_rows=1)
    found = config(storage=given, initializer=Normal(std=2.0)).to_torchembed()
    assert (found.storage, found.initializer) == (given, Normal(std=2.0))
