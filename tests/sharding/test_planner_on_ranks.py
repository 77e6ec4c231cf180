"""Planners in ``shard_embeddings``, on real ranks, and what is refused there."""

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torchembed
from tests.support.planning import make_topology
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import Case, make_batch, make_model, vectors_of
from torchembed.modules import table_uses
from torchembed.modules.sharded.model_plan import with_topology
from torchembed.sharding import NodeDisk, Planner, TableConstraint, Topology
from torchembed.sharding.planning.node_disk import DISK_SHARE
from torchembed.sharding.transport.table_ranks import flat_mesh

SOME = Case(placements={})
HOTNESS = {"f0": 1.75, "f1": 1.75, "f2": 1.75, "f3": 1.75}


def huge_model() -> nn.Module:
    """A table of four terabytes, on the meta device."""
    config = torchembed.EmbeddingBagConfig(
        name="huge", num_embeddings=10**10, embedding_dim=100, feature_names=("f",)
    )
    model = nn.Module()
    model.tables = torchembed.EmbeddingBagCollection([config], device="meta")
    return model


def planned(plan: Any, pooled: bool, shape: tuple[int, ...]) -> dict[str, Any]:
    """Vectors of a model sharded by ``plan``, and those of the same model unsharded."""
    case = Case(placements={}, pooled=pooled)
    mesh = init_device_mesh("cpu", shape)
    source = make_model(case)
    batch = make_batch(case, dist.get_rank(), 0)
    expected = vectors_of(source.tables(batch)).detach().numpy()
    report = torchembed.plan_embeddings(source, None if plan == "auto" else plan, mesh)
    sharded = torchembed.shard_embeddings(source, mesh, plan)
    return {
        "vectors": vectors_of(sharded.tables(batch)).detach().numpy(),
        "expected": expected,
        "plan": report.plan.to_json(),
        "text": str(report),
    }


def constraints(container: str) -> dict[str, TableConstraint]:
    wished = {"a": "column_wise", "b": "table_row_wise", "c": "row_wise", "d": "data_parallel"}
    return {
        f"tables.{container}.{name}": TableConstraint(placements=(placement,))
        for name, placement in wished.items()
    }


def on_four_ranks(folder: str) -> dict[str, Any]:
    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    group, cpu = line.get_group(), torch.device("cpu")
    by_cost = Planner(batch_size=64, hotness=HOTNESS)
    bags, sequences = constraints("embedding_bags"), constraints("embeddings")
    results: dict[str, Any] = {
        "topologies": [Topology.of_group(group, cpu, num_nodes=n) for n in (1, 2)],
        "planned": {
            "pooled": planned(by_cost, True, (4,)),
            "sequence": planned(by_cost, False, (4,)),
            "auto": planned("auto", True, (2, 2)),
            "all": planned(Planner(constraints=bags), True, (2, 2)),
            "all sequences": planned(Planner(constraints=sequences), False, (2, 2)),
        },
    }
    huge, rank = huge_model(), dist.get_rank()
    attempts: dict[str, tuple[Any, ...]] = {
        "huge": (huge, grid, Planner(batch_size=4)),
        "huge by auto": (huge, line, "auto"),
        "name": (make_model(SOME), line, "fastest"),
        "mesh": (make_model(SOME), line, Planner(topology=make_topology(1, 8))),
        "nodes": (make_model(SOME), line, Planner(topology=make_topology(2, 2))),
        "differ": (make_model(SOME), line, Planner(batch_size=4 + rank % 2)),
        "one plans": (make_model(SOME), line, "auto" if rank == 3 else None),
    }
    results["messages"] = {}
    for name, arguments in attempts.items():
        try:
            torchembed.shard_embeddings(*arguments)
        except ValueError as error:
            results["messages"][name] = str(error)
    device = torch.device("cuda", 99) if rank == 2 else cpu
    with pytest.raises(Exception) as error:  # noqa: PT011 - what torch raises is its own affair
        Topology.of_group(group, device)
    results["silent"] = str(error.value)
    disk, of_two = NodeDisk(path=folder), flat_mesh(grid)
    of_mesh = [
        with_topology(planner, grid, of_two).topology
        for planner in (
            Planner(disk=disk),
            Planner(topology=dataclasses.replace(make_topology(2, 2), disk=disk)),
        )
    ]
    results["disks"] = [topology.disk for topology in of_mesh if topology is not None]
    missing = NodeDisk(path=f"{folder}/a/b") if rank == 1 else disk
    try:
        with_topology(Planner(disk=missing), line, line)
    except (OSError, RuntimeError) as problem:
        results["no disk"] = f"{type(problem).__name__}: {problem}"
    results["huge is as it was"] = type(huge.tables).__name__
    return results


MESSAGES = {
    "name": r"plan must be \"auto\", a Planner, a ShardingPlan or placements by table, "
    r"got 'fastest'",
    "mesh": r"topology of the planner has 1 node\(s\) of 8 rank\(s\), but mesh has 1 of 4",
    "nodes": r"topology of the planner has 2 node\(s\) of 2 rank\(s\), but mesh has 1 of 4",
    "huge": r"tables do not fit: in the best plan found rank \d would need .* the heaviest: "
    r"tables.embedding_bags.huge \(7.276 TiB\)\. Use more ranks .*",
    "huge by auto": r"tables do not fit: .*",
    "differ": r"ranks must agree on the planner: rank 0 has batch_size=4, rank 1 has "
    r"batch_size=5; start every .*",
    "one plans": r"ranks must agree on the planner: rank 0 has no planner, rank 3 has a planner.*",
}


def test_planned_models_run_and_others_are_refused(tmp_path: Path) -> None:
    results = run_on_ranks(4, on_four_ranks, str(tmp_path))
    first = results[0]
    silent = r"ranks \[2\] could not tell the memory of their devices"
    for rank, result in enumerate(results):
        assert bool(re.match(silent, result["silent"])) is (rank != 2)
        assert result["topologies"] == first["topologies"]
        assert result["disks"] == first["disks"]
        for disk in result["disks"]:
            free = shutil.disk_usage(tmp_path).free
            # Each of two nodes of two ranks has half of the host's, but for what others write.
            assert disk.capacity_bytes / DISK_SHARE == pytest.approx(free / 2, abs=2**30)
        assert re.match(
            "FileNotFoundError: path of a disk must be"
            if rank == 1
            else r"RuntimeError: ranks \[1\] could not tell what is free at ",
            result["no disk"],
        )
        shapes = [(t.num_nodes, t.ranks_per_node) for t in result["topologies"]]
        assert shapes == [(1, 4), (2, 2)]
        for name, part in result["planned"].items():
            assert part["plan"] == first["planned"][name]["plan"]
            # Vectors of at most 4 ids come in another order: 4 roundings of a sum of 4 values
            # below 1, as initial rows are.
            error = abs(part["vectors"] - part["expected"]).max(initial=0)
            assert error <= 4 * 4 * torch.finfo(torch.float32).eps, name
        assert set(result["messages"]) == set(MESSAGES)
        for name, pattern in MESSAGES.items():
            assert re.fullmatch(pattern, result["messages"][name]), result["messages"][name]
        assert result["huge is as it was"] == "EmbeddingBagCollection"
    texts = {name: part["text"] for name, part in first["planned"].items()}
    # 3 rows, fewer than the 64 samples that a rank is planned for.
    assert re.search(r"tables\.embedding_bags\.d +data_parallel +0-3", texts["pooled"])
    assert not re.search(r"tables\.embeddings\.d +data_parallel", texts["sequence"])
    for name in ("all", "all sequences"):
        for placement in ("column_wise", "table_row_wise", "row_wise", "data_parallel"):
            assert f" {placement} " in texts[name]


@pytest.mark.parametrize("pooled", [True, False])
def test_uses_are_found_in_the_model(pooled: bool) -> None:
    uses = table_uses(make_model(Case(placements={}, pooled=pooled), "meta"))
    container = "embedding_bags" if pooled else "embeddings"
    assert {name: use.features for name, use in uses.items()} == {
        f"tables.{container}.a": ("f0", "f1"),
        f"tables.{container}.b": ("f2",),
        f"tables.{container}.c": ("f0",),
        f"tables.{container}.d": ("f3",),
    }
    assert all(use.pooled is pooled for use in uses.values())
    assert all(use.output_dtype is torch.float32 for use in uses.values())


def test_a_plan_needs_no_mesh_where_the_planner_has_a_topology() -> None:
    model = make_model(Case(placements={}), "meta")
    report = torchembed.plan_embeddings(model, Planner(topology=make_topology(2, 2)))
    assert report.plan.num_ranks == 4
    with pytest.raises(ValueError, match=re.escape("topology must be given")):
        torchembed.plan_embeddings(model)
