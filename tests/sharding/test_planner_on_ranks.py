"""Planners in ``shard_embeddings``, on real ranks, and what is refused there."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torchembed
from tests.ranks import run_on_ranks
from tests.sharding.cases import Case, make_batch, make_model, vectors_of
from tests.sharding.planning import make_topology
from torchembed.modules import table_uses
from torchembed.sharding import Planner, Topology

PLACEMENTS = ("data_parallel", "table_wise", "row_wise")
HOTNESS = {"f0": 1.75, "f1": 1.75, "f2": 1.75, "f3": 1.75}


def huge_model() -> nn.Module:
    """A table of four terabytes, on the meta device."""
    config = torchembed.EmbeddingBagConfig(
        name="huge", num_embeddings=10**10, embedding_dim=100, feature_names=("f",)
    )
    model = nn.Module()
    model.tables = torchembed.EmbeddingBagCollection([config], device="meta")
    return model


def planned(planner: Planner | str, pooled: bool) -> dict[str, Any]:
    """Vectors of a model sharded by ``planner``, and those of the same model unsharded."""
    case = Case(placements={}, pooled=pooled)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    source = make_model(case)
    batch = make_batch(case, dist.get_rank(), 0)
    expected = vectors_of(source.tables(batch)).detach().numpy()
    own = planner if isinstance(planner, Planner) else None
    report = torchembed.plan_embeddings(source, own, mesh)
    sharded = torchembed.shard_embeddings(source, mesh, planner)
    return {
        "vectors": vectors_of(sharded.tables(batch)).detach().numpy(),
        "expected": expected,
        "plan": report.plan.to_json(),
        "text": str(report),
    }


def on_two_ranks() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    small = Planner(batch_size=64, hotness=HOTNESS, placements=PLACEMENTS)
    topology = Topology.of_group(mesh.get_group(), torch.device("cpu"))
    as_nodes = Topology.of_group(mesh.get_group(), torch.device("cpu"), num_nodes=2)
    results: dict[str, Any] = {
        "topology": topology,
        "nodes": (as_nodes.num_nodes, as_nodes.ranks_per_node),
        "pooled": planned(small, True),
        "sequence": planned(small, False),
    }
    huge = huge_model()
    attempts: dict[str, tuple[Any, ...]] = {
        "huge": (huge, mesh, Planner(batch_size=4, placements=PLACEMENTS)),
        "auto": (huge, mesh, "auto"),
        "name": (make_model(Case(placements={})), mesh, "fastest"),
        "mesh": (
            make_model(Case(placements={})),
            mesh,
            Planner(topology=make_topology(1, 4)),
        ),
        "nodes": (
            make_model(Case(placements={})),
            mesh,
            Planner(topology=make_topology(2, 1)),
        ),
    }
    messages = {}
    for name, arguments in attempts.items():
        try:
            torchembed.shard_embeddings(*arguments)
        except ValueError as error:
            messages[name] = str(error)
    results["messages"] = messages
    results["huge is as it was"] = type(huge.tables).__name__
    return results


def test_planned_models_run_and_others_are_refused() -> None:
    results = run_on_ranks(2, on_two_ranks)
    first = results[0]
    for result in results:
        assert result["topology"] == first["topology"]
        assert (result["topology"].num_nodes, result["topology"].ranks_per_node) == (1, 2)
        assert result["nodes"] == (2, 1)
        for kind in ("pooled", "sequence"):
            part = result[kind]
            assert part["plan"] == first[kind]["plan"]
            # Vectors of at most 4 ids come in another order: 4 roundings of a sum of 4 values
            # below 1, as initial rows are.
            error = abs(part["vectors"] - part["expected"]).max(initial=0)
            assert error <= 4 * 4 * torch.finfo(torch.float32).eps
        messages = result["messages"]
        assert set(messages) == {"huge", "auto", "name", "mesh", "nodes"}
        for name in ("huge", "auto"):
            assert messages[name].startswith("tables do not fit: in the best plan found rank ")
            assert "the heaviest: tables.embedding_bags.huge (7.276 TiB)" in messages[name]
        assert messages["name"] == (
            "plan must be \"auto\", a Planner, a ShardingPlan or placements by table, got 'fastest'"
        )
        assert messages["mesh"] == (
            "topology of the planner has 1 node(s) of 4 rank(s), but mesh has one of 2"
        )
        assert messages["nodes"] == (
            "topology of the planner has 2 node(s) of 1 rank(s), but mesh has one of 2"
        )
        assert result["huge is as it was"] == "EmbeddingBagCollection"
    # 3 rows, fewer than the 64 samples that a rank is planned for.
    assert "tables.embedding_bags.d  data_parallel  0-1" in first["pooled"]["text"]
    assert "tables.embeddings.d  data_parallel" not in first["sequence"]["text"]


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
