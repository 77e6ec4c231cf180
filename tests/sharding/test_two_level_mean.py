"""The mean of dense gradients over several nodes: within each, and between them."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torchembed
from tests.support.gradient_means import assert_means
from tests.support.planning import make_topology
from tests.support.ranks import run_on_ranks
from tests.support.values import normal
from torchembed.sharding import Planner
from torchembed.sharding.transport.gradient_mean import GradientMean
from torchembed.sharding.transport.process_groups import borrow_groups
from torchembed.sharding.transport.two_level_mean import TwoLevelMean

NUM_RANKS, NUM_NODES = 4, 2
SIZES = ((), (1,), (2, 3), (0,), (257,))
"""Shapes of tensors that are averaged together: 265 elements, no multiple of a node's ranks."""
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def test_the_mean_of_gradients_however_they_come() -> None:
    assert_means(
        NUM_RANKS, "cpu", ("at once", "at the end"), "gloo", num_nodes=NUM_NODES, sizes=(200,)
    )


def tensors_of(rank: int, *, whole_numbers: bool) -> list[torch.Tensor]:
    made = [
        normal(math.prod(size), seed=10 * rank + n, dtype=torch.float64).view(size)
        for n, size in enumerate(SIZES)
    ]
    return [(9 * one).round() if whole_numbers else one for one in made]


def means_on_rank() -> dict[str, Any]:
    """The groups of this rank, its means by dtype, and those of several that are under way."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    nodes = borrow_groups(mesh, NUM_NODES).gradient_nodes
    assert nodes is not None
    assert borrow_groups(mesh).gradient_nodes is None
    mean, found = TwoLevelMean(nodes), {}
    for whole in (True, False):
        for dtype in DTYPES:
            tensors = [t.to(dtype) for t in tensors_of(dist.get_rank(), whole_numbers=whole)]
            before = [t.clone() for t in tensors]
            started = mean.start(tensors, dtype)
            started.work.wait()
            assert all(map(torch.equal, tensors, before))
            found[whole, dtype] = started.mean.double().numpy()
    under_way = [mean.start([torch.full((n,), 1.0 + n)], torch.float32) for n in (3, 1, 2)]
    for started in under_way:
        started.work.wait()
    found["under way"] = [started.mean.tolist() for started in under_way]
    found["groups"] = [dist.get_process_group_ranks(group) for group in nodes]
    return found


def test_ranks_have_the_same_bits_and_whole_numbers_are_exact() -> None:
    by_rank = run_on_ranks(NUM_RANKS, means_on_rank)
    assert [found["groups"] for found in by_rank] == [
        [[0, 1], [0, 2]],
        [[0, 1], [1, 3]],
        [[2, 3], [0, 2]],
        [[2, 3], [1, 3]],
    ]
    for whole in (True, False):
        of_ranks = [
            torch.cat([t.flatten() for t in tensors_of(rank, whole_numbers=whole)])
            for rank in range(NUM_RANKS)
        ]
        for dtype in DTYPES:
            for other in by_rank[1:]:
                np.testing.assert_array_equal(other[whole, dtype], by_rank[0][whole, dtype])
            stacked = torch.stack(of_ranks).to(dtype).double()
            wanted, found = stacked.mean(0).numpy(), by_rank[0][whole, dtype]
            if whole:
                np.testing.assert_array_equal(found, wanted)
                continue
            # Two sums and a division, each rounded once, of terms of either sign; beside that the
            # oracle's own.
            eps = torch.finfo(dtype).eps + torch.finfo(torch.float64).eps
            bound = 3 * eps * stacked.abs().sum(0).numpy() / NUM_RANKS
            assert (np.abs(found - wanted) <= bound).all()
    assert by_rank[0]["under way"] == [[4.0] * 3, [2.0], [3.0] * 2]


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("on its way back")


def collectives_and_gradients() -> list[Any]:
    """Of a sharded model: names of the collectives of its dense gradients; then its gradients after
    a backward that failed with a mean under way."""
    mesh = init_device_mesh("cpu", (NUM_NODES, NUM_RANKS // NUM_NODES))
    model = nn.ModuleDict(
        {
            "table": torchembed.EmbeddingBagCollection(
                [
                    torchembed.EmbeddingBagConfig(
                        name="t", num_embeddings=8, embedding_dim=2, feature_names=("f",)
                    )
                ]
            ),
            "dense": nn.Linear(2, 1, bias=False),
        }
    )
    torchembed.shard_embeddings(model, mesh, {"table.embedding_bags.t": "row_wise"})
    dense = model["dense"]
    dense.weight.data.fill_(1.0)
    x = torch.full((1, 2), 1.0 + dist.get_rank())
    dense(x).sum().backward()
    dense.weight.grad = None
    with torch.profiler.profile() as profile:
        dense(x).sum().backward()
    of_dense = ("c10d::_reduce_scatter", "c10d::allreduce", "c10d::_allgather")
    names = [e.name for e in profile.events() if e.name.startswith(of_dense)]
    found: list[Any] = [names, dense.weight.grad.tolist()]

    groups = borrow_groups(init_device_mesh("cpu", (NUM_RANKS,)), NUM_NODES)
    first, last = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    parameters = [first.weight, last.weight]
    mean = GradientMean(parameters, groups.gradients, nodes=groups.gradient_nodes, bucket_bytes=1)
    for parameter in parameters:
        parameter.data.fill_(1.0)
    x = x[:, :1]
    with pytest.raises(ArithmeticError, match="on its way back"):
        last(Fails.apply(first(x))).sum().backward()
    assert mean._reductions
    for parameter in parameters:
        parameter.grad = None
    last(first(x)).sum().backward()
    return [*found, [parameter.grad.item() for parameter in parameters]]


def buckets_and_bits() -> list[tuple[int, list[np.ndarray]]]:
    """For meetings that take no time, and some: the buckets of a model's dense gradients, 7 MB in
    five weights, and the gradients."""
    mesh = init_device_mesh("cpu", (NUM_NODES, NUM_RANKS // NUM_NODES))
    config = torchembed.EmbeddingBagConfig(
        name="t", num_embeddings=8, embedding_dim=2, feature_names=("f",)
    )
    found = []
    for seconds in (0.0, 1.0):
        model = nn.ModuleDict({"table": torchembed.EmbeddingBagCollection([config])})
        model["dense"] = nn.Sequential(*(nn.Linear(600, 600, bias=False) for _ in range(5)))
        for seed, parameter in enumerate(model["dense"].parameters()):
            parameter.data = normal(600, 600, seed=seed) / 25
        topology = make_topology(NUM_NODES, NUM_RANKS // NUM_NODES)
        topology = dataclasses.replace(topology, peer_seconds=seconds)
        torchembed.shard_embeddings(model, mesh, Planner(batch_size=4, topology=topology))
        x = normal(4, 600, seed=100 + dist.get_rank())
        with torch.profiler.profile() as profile:
            model["dense"](x).square().mean().backward()
        reduced = [event for event in profile.events() if event.name == "c10d::allreduce_"]
        gradients = [p.grad.numpy() for p in model["dense"].parameters() if p.grad is not None]
        found.append((len(reduced), gradients))
    return found


def test_the_size_of_buckets_changes_no_bits() -> None:
    by_rank = run_on_ranks(NUM_RANKS, buckets_and_bits)
    (_, expected), _ = by_rank[0]
    assert len(expected) == 5
    for found in by_rank:
        assert [num_buckets for num_buckets, _ in found] == [2, 1]
        for _, gradients in found:
            # Two numbers are added in each level, in either order.
            for one, other in zip(gradients, expected, strict=True):
                np.testing.assert_array_equal(one, other)


def test_a_model_on_several_nodes_averages_in_two_levels() -> None:
    in_levels = ["c10d::_reduce_scatter_base_", "c10d::allreduce_", "c10d::_allgather_base_"]
    for names, gradient, after_failure in run_on_ranks(NUM_RANKS, collectives_and_gradients):
        assert names == in_levels
        assert gradient == [[2.5, 2.5]]
        assert after_failure == [2.5, 2.5]
