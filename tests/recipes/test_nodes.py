"""The ranks of a run on several nodes."""

import os

import pytest
import torch
import torch.distributed as dist

from recipes.ranks import num_nodes, rank_mesh
from tests.support.ranks import run_on_ranks


def meshes(ranks_of_nodes: list[list[int]]) -> list[tuple[int, list[object]]]:
    """On one rank: number of nodes and mesh where so many ranks are on its node, in each case."""
    found = []
    for ranks_of_node in ranks_of_nodes:
        os.environ["LOCAL_WORLD_SIZE"] = str(ranks_of_node[dist.get_rank()])
        found.append((num_nodes(), rank_mesh(torch.device("cpu")).mesh.tolist()))
    return found


def test_a_mesh_has_the_nodes_of_the_launch() -> None:
    cases = [[4, 4, 4, 4], [2, 2, 2, 2], [1, 1, 1, 1], [3, 3, 3, 1]]
    flat = [0, 1, 2, 3]
    expected = [(1, flat), (2, [[0, 1], [2, 3]]), (4, [[n] for n in flat]), (1, flat)]
    for found in run_on_ranks(4, meshes, cases):
        assert found == expected


def test_a_process_alone_is_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert num_nodes() == 1
