"""The ranks of a run on several nodes."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from recipes.precision import wire_precision
from recipes.ranks import num_nodes, rank_mesh, shard_over_ranks
from recipes.train import parse
from tests.support.ranks import run_on_ranks
from torchembed import EmbeddingBagCollection, EmbeddingBagConfig
from torchembed.optim import Adagrad
from torchembed.sharding import Placement, WirePrecision


def meshes(ranks_of_nodes: list[list[int]]) -> list[tuple[int, list[object]]]:
    """On one rank: number of nodes and mesh where so many ranks are on its node, in each case."""
    found = []
    for ranks_of_node in ranks_of_nodes:
        os.environ["LOCAL_WORLD_SIZE"] = str(ranks_of_node[dist.get_rank()])
        found.append((num_nodes(), rank_mesh(torch.device("cpu")).mesh.tolist()))
    return found


def on_a_rank(cases: list[list[int]]) -> tuple[list[tuple[int, list[object]]], list[WirePrecision]]:
    return meshes(cases), [wire_of_a_recipe(name) for name in ("dlrm_dcnv2", "dcnv2.frappe")]


def wire_of_a_recipe(name: str) -> WirePrecision:
    """The wire of a model that is sharded by a recipe's flags."""
    config = parse([name, "--wire-forward", "FP8", "--wire-backward", "BF16"]).config
    table = EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=("t",))
    model = nn.Sequential(EmbeddingBagCollection([table], device="meta"))
    wire = wire_precision(config.wire_forward, config.wire_backward)
    shard_over_ranks(model, torch.device("cpu"), Adagrad, Placement.TABLE_WISE, wire=wire)
    return model[0]._ranks.wire


def test_a_mesh_has_the_nodes_of_the_launch_and_flags_set_the_wire() -> None:
    cases = [[4, 4, 4, 4], [2, 2, 2, 2], [1, 1, 1, 1], [3, 3, 3, 1]]
    flat = [0, 1, 2, 3]
    expected = [(1, flat), (2, [[0, 1], [2, 3]]), (4, [[n] for n in flat]), (1, flat)]
    wire = WirePrecision(forward=torch.float8_e4m3fn, backward=torch.bfloat16)
    for found, wires in run_on_ranks(4, on_a_rank, cases):
        assert found == expected
        assert wires == [wire, wire]


def test_a_process_alone_is_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert num_nodes() == 1
