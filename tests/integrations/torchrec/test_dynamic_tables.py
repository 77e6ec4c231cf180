"""Dynamic tables under TorchRec: they train as static ones do whose rows their ids name."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchembed
from tests.support.dynamic_torchrec import (
    DIM,
    KEYS,
    NUM_IDS,
    POOL,
    Case,
    batch,
    in_pipeline,
    make,
    num_ids_held,
    trained,
)
from tests.support.ranks import run_on_ranks
from torchembed import LFU, Dynamic, MinimumCount
from torchembed.checkpoints import managed_collision_rows
from torchembed.tables import RowChunk

NUM_STEPS = 4

CASES = {
    "table_wise": Case(["table_wise"] * 3, is_weighted=True),
    "row_wise": Case(["row_wise"] * 3, is_weighted=True, optimizer="adam"),
    "column_wise": Case(["column_wise"] * 3, optimizer="adagrad"),
    "table_row_wise": Case(["table_row_wise"] * 3),
    "columns on one rank": Case(["columns on one rank", "row_wise", "data_parallel"]),
    "two policies": Case(["row_wise", "row_wise", "table_wise"], other=Dynamic(eviction=LFU())),
    "two widths in a kernel": Case(["row_wise"] * 3, dims={"b": 12}, is_weighted=True),
    "sequences": Case(["row_wise", "table_wise", "row_wise"], is_sequence=True, is_fixed=True),
    "sequences, by column": Case(["column_wise", "row_wise", "row_wise"], is_sequence=True),
}


def everything_on_the_cpu() -> dict[str, Any]:
    """On a rank: for each case whether outputs are equal, and how many ids tables hold."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        kinds = {"is_weighted": case.is_weighted, "is_fixed": case.is_fixed}
        dynamic, static = (make(case, is_dynamic=d) for d in (True, False))
        steps = range(NUM_STEPS)
        ours, theirs = (
            trained(model, (batch(step, is_dynamic=d, **kinds) for step in steps))
            for model, d in ((dynamic, True), (static, False))
        )
        equal = [bool(torch.equal(a, b)) for a, b in zip(ours, theirs, strict=True)]
        counts = [num_ids_held(dynamic)]
        piped: list[bool] | None = None
        if case.optimizer != "adam":
            steps = range(NUM_STEPS, 2 * NUM_STEPS)
            ours, theirs = (
                in_pipeline(model, [batch(step, is_dynamic=d, **kinds) for step in steps])
                for model, d in ((dynamic, True), (static, False))
            )
            piped = [bool(torch.equal(a, b)) for a, b in zip(ours, theirs, strict=True)]
            counts.append(num_ids_held(dynamic))
        found[name] = equal, piped, counts
    return {
        **found,
        "rows": what_is_written(),
        "refused": what_is_refused(),
        "missing": missing(),
        "collisions": from_collisions(),
    }


def what_is_written() -> dict[str, Any]:
    """On a rank: rows that are written by id, looked up again, read, erased and evicted."""
    from torchrec import KeyedJaggedTensor

    from torchembed.integrations.torchrec import dynamic_tables

    case = Case(["row_wise", "column_wise", "table_wise"])
    model = make(case, is_dynamic=True)
    model.eval()
    held = dynamic_tables(model)
    rows = torch.arange(20.0 * DIM).reshape(20, DIM)
    chunk = RowChunk(POOL[:20], rows, {}, scores=torch.arange(20))
    found: dict[str, Any] = {"names": list(held)}
    found["left"] = [table.write_rows(chunk) for table in held.values()]
    values, lengths = POOL[:20].repeat(2), torch.ones(60, dtype=torch.int32)
    features = KeyedJaggedTensor(
        list(KEYS), torch.cat([values, torch.zeros_like(POOL[:20])]), lengths=lengths
    )
    with torch.no_grad():
        looked_up = model.module.sparse(features)
        names = ("user", "item@a", "item@b")
        found["equal"] = [torch.equal(looked_up[name], rows) for name in names]
    nothing = KeyedJaggedTensor(
        list(KEYS), torch.zeros(0, dtype=torch.int64), lengths=torch.zeros(6, dtype=torch.int32)
    )
    model.train()
    found["of nothing"] = float(model(nothing)[0])
    first, second = held["sparse.a"], held["sparse.b"]
    sizes = [len(part.keys) for part in first.row_chunks(10**6, with_states=False)]
    found["sizes"] = [sum(sizes), _size(first), _size(second)]
    first.erase(POOL[:10])
    second.evict(max_rows=3)
    found["after"] = [_size(first), _size(second)]
    (kept,) = second.row_chunks(10**6)
    found["kept"] = [POOL.tolist().index(key) for key in kept.keys.tolist()]
    return found


def alone() -> list[bool]:
    """On a single rank, whose model TorchRec's planner places: whether it trains as torchembed's
    collection of the same configs."""
    import torchrec
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
    from torchrec.distributed.types import ShardingEnv

    from torchembed.integrations.torchrec import EmbeddingBagConfig, get_default_sharders

    configs = [
        EmbeddingBagConfig(
            name=name, num_embeddings=40, embedding_dim=DIM, feature_names=[name], dynamic=dynamic
        )
        for name, dynamic in (("user", Dynamic(eviction=LFU())), ("item", Dynamic()))
    ]
    bags = torchrec.EmbeddingBagCollection(configs, device=torch.device("meta"))
    _apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.1})
    model, sharders = nn.Sequential(bags), get_default_sharders()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu"),
        storage_reservation=FixedPercentageStorageReservation(0.1),
    )
    theirs = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=planner.plan(model, sharders),
        sharders=sharders,
    )
    ours = torchembed.EmbeddingBagCollection(configs)
    optimizer = torchembed.optim.SGD(ours.parameters(), lr=0.1)
    equal = []
    for step in range(6):
        features = batch(step, is_dynamic=True, is_weighted=False, is_fixed=True)
        features = torchrec.KeyedJaggedTensor(
            ["user", "item"], features.values()[:24], lengths=features.lengths()[:12]
        )
        outputs = [theirs(features), ours(features)]
        for output in outputs:
            output.values().square().mean().backward()
        optimizer.step()
        equal += [torch.equal(outputs[0][name], outputs[1][name]) for name in ("user", "item")]
    return equal


def from_collisions() -> bool:
    """On a rank: whether a table of TorchRec's managed collisions goes over, row by row."""
    import torchrec
    from torchrec.modules import mc_modules
    from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection

    from torchembed.integrations.torchrec import dynamic_tables

    config = torchrec.EmbeddingBagConfig(
        name="a", embedding_dim=DIM, num_embeddings=20, feature_names=["user"]
    )
    device = torch.device("cpu")
    module = mc_modules.MCHManagedCollisionModule(
        zch_size=20,
        device=device,
        eviction_policy=mc_modules.LFU_EvictionPolicy(),
        eviction_interval=2,
    )
    torch.manual_seed(0)
    theirs = ManagedCollisionEmbeddingBagCollection(
        torchrec.EmbeddingBagCollection([config], device=device),
        mc_modules.ManagedCollisionCollection({"a": module}, [config]),
    )
    lengths = torch.ones(15, dtype=torch.int32)
    for _ in range(4):
        theirs(torchrec.KeyedJaggedTensor(["user"], POOL[5:20], lengths=lengths))
    theirs.eval()
    expected, _ = theirs(torchrec.KeyedJaggedTensor(["user"], POOL[5:20], lengths=lengths))
    state = theirs.state_dict()
    rows = managed_collision_rows(
        state,
        state["_embedding_module.embedding_bags.a.weight"],
        prefix="_managed_collision_collection._managed_collision_modules.a.",
    )
    model = make(Case(["row_wise"] * 3), is_dynamic=True)
    for chunk in rows:
        dynamic_tables(model)["sparse.a"].write_rows(chunk)
    model.eval()
    nothing = torch.zeros(30, dtype=torch.int32)
    features = torchrec.KeyedJaggedTensor(
        list(KEYS), POOL[5:20], lengths=torch.cat([lengths, nothing])
    )
    return torch.equal(model.module.sparse(features)["user"], expected["user"])


VECTOR = [0.5, -1.0, *(0.25 for _ in range(10))]


def missing() -> list[list[bool]]:
    """On a rank: whether ids that get no rows are looked up as ``missing`` says, in training,
    evaluation and the pipeline."""
    rare = MinimumCount(1000)
    policies = {
        "dynamic": Dynamic(missing="initial", admission=rare),
        "other": Dynamic(missing=VECTOR, admission=rare),
        "dims": {"b": len(VECTOR)},
        "is_weighted": True,
    }
    found = []
    for placements in (["row_wise", "row_wise", "table_wise"], ["column_wise"] * 3):
        case = Case(placements, **policies)
        dynamic, static = (make(case, is_dynamic=d) for d in (True, False))
        for name, weight in static.state_dict().items():
            if ".b." in name:
                for shard in weight.local_shards():
                    (_, column), (_, width) = shard.metadata.shard_offsets, shard.tensor.shape
                    shard.tensor.copy_(torch.tensor(VECTOR)[column : column + width])
        kinds = {"is_weighted": True, "is_fixed": False}
        ours, theirs = (batch(0, is_dynamic=d, **kinds) for d in (True, False))
        expected = static(theirs)[1][0]
        outputs = [dynamic(ours)[1][0]]
        dynamic.eval()
        outputs.append(dynamic(ours)[1][0])
        dynamic.train()
        outputs += in_pipeline(dynamic, [ours])
        found.append([torch.equal(output, expected) for output in outputs])
    return found


def _size(table: Any) -> int:
    return table.statistics(wait=True).size


def what_is_refused() -> dict[str, str]:
    """On a rank: errors' types and texts."""
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec import EmbeddingCollection
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.types import ShardingPlan

    from tests.support.torchrec_training import plan_of
    from torchembed.integrations import torchrec as ours

    def shard(placement: str, sharder: Any) -> None:
        config = ours.EmbeddingConfig(
            name="a", num_embeddings=8, embedding_dim=4, feature_names=["user"], dynamic=Dynamic()
        )
        sparse = EmbeddingCollection([config], device=torch.device("meta"))
        _apply_optimizer_in_backward(torch.optim.SGD, sparse.parameters(), {"lr": 0.1})
        plan = plan_of(sparse, [placement], "cpu", ("a",)).plan["sparse"]
        model = nn.Sequential(sparse)
        plans = ShardingPlan(plan={"0": plan})
        device = torch.device("cpu")
        DistributedModelParallel(model, device=device, plan=plans, sharders=[sharder])

    found = {}
    clipping = {"gradient_clipping": True}
    for name, placement, settings in (
        ("placement", "data_parallel", {}),
        ("dedup", "table_wise", {"use_index_dedup": True}),
        ("clipping", "table_wise", {"fused_params": clipping}),
    ):
        try:
            shard(placement, ours.EmbeddingCollectionSharder(**settings))
        except Exception as error:  # noqa: BLE001 - compared by the test
            found[name] = f"{type(error).__name__}: {error}"
    return found


def expected_counts(case: Case, num_steps: int) -> dict[str, int]:
    """How many different ids have come to each table on two ranks."""
    seen: dict[str, set[int]] = {"a": set(), "b": set()}
    for step in range(num_steps):
        for rank in range(2):
            generator = torch.Generator().manual_seed(step * 8 + rank)
            lengths = torch.randint(0, 3, (len(KEYS), 6), generator=generator)
            if case.is_fixed:
                lengths = torch.full_like(lengths, 2)
            numbers = torch.randint(0, NUM_IDS, (int(lengths.sum()),), generator=generator)
            users, items, _ = (part.tolist() for part in numbers.split(lengths.sum(1).tolist()))
            seen["a"].update(users + items)
            seen["b"].update(items)
    copies = {
        name: 2 if "column" in placement else 1
        for name, placement in zip("ab", case.placements, strict=False)
    }
    return {name: len(ids) * copies[name] for name, ids in seen.items()}


@pytest.mark.parametrize("name", CASES)
def test_dynamic_tables_train_as_static_ones(cpu_answers: list[Any], name: str) -> None:
    case = CASES[name]
    for answers in cpu_answers:
        equal, piped, counts = answers["dynamic_tables"][name]
        assert equal == [True] * (NUM_STEPS + 1)
        assert piped is None or piped == [True] * NUM_STEPS
        assert counts[0] == expected_counts(case, NUM_STEPS)
        if piped is not None:
            assert counts[1] == expected_counts(case, 2 * NUM_STEPS)


def test_rows_by_id(cpu_answers: list[Any]) -> None:
    of_ranks = [answers["dynamic_tables"]["rows"] for answers in cpu_answers]
    for found in of_ranks:
        assert found["names"] == ["sparse.a", "sparse.b"]
        assert found["left"] == [0, 0]
        assert found["equal"] == [True] * 3
        assert found["of nothing"] == 0
        assert found["sizes"][1:] == [20, 20]
        assert found["after"] == [10, 3]
        # Those of the greatest scores stay: under LRU they were used last.
        assert sorted(found["kept"]) == [17, 18, 19]
    assert sum(found["sizes"][0] for found in of_ranks) == 20


@pytest.mark.usefixtures("cpu_answers")  # where TorchRec is installed, on the CPU
def test_one_rank() -> None:
    assert run_on_ranks(1, alone) == [[True] * 12]


def test_rows_of_managed_collisions(cpu_answers: list[Any]) -> None:
    assert [answers["dynamic_tables"]["collisions"] for answers in cpu_answers] == [True, True]


def test_missing(cpu_answers: list[Any]) -> None:
    for answers in cpu_answers:
        assert answers["dynamic_tables"]["missing"] == [[True] * 3] * 2


def test_what_is_refused(cpu_answers: list[Any]) -> None:
    for answers in cpu_answers:
        found = answers["dynamic_tables"]["refused"]
        assert found["placement"].startswith(
            "ValueError: dynamic table a must have one of the sharding types table_wise"
        )
        assert "got sharding type data_parallel; give the planner" in found["placement"]
        for name, reason in (("dedup", "use_index_dedup"), ("clipping", "gradient_clipping")):
            assert found[name].startswith("ValueError: dynamic tables a must be sharded by")
            assert reason in found[name]
