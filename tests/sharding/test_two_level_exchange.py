"""Ids, vectors and gradients over several nodes: the same bits as by one all-to-all."""

import dataclasses
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import torchembed
from tests.support.driving import trained_jagged
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import Case, held_rows, make_batch, make_model, vectors_of
from tests.support.values import normal
from torchembed.sharding import WirePrecision
from torchembed.sharding.planning.plan import ShardingPlan
from torchembed.sharding.transport.rank_exchange import (
    FlatExchange,
    Lines,
    RankExchange,
    Sizes,
    differentiable_back,
    differentiable_out,
)
from torchembed.sharding.transport.table_ranks import TableRanks
from torchembed.sharding.transport.two_level_exchange import TwoLevelExchange

NUM_RANKS, NUM_NODES = 4, 2
WIRES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
WIDTHS = ((3,), (2, 1), (), (1, 1, 4))
"""Elements of the vectors of a line, for each rank of rows."""
UNEVEN = np.array([[2, 0, 1, 5], [0, 0, 0, 3], [4, 1, 0, 0], [1, 2, 300, 6]])
"""What each rank sends to each."""
ALL_SIZES = (UNEVEN, UNEVEN.T, 0 * UNEVEN, np.outer([0, 3, 0, 0], [0, 0, 1, 0]))

PLACEMENTS = {"a": "column_wise", "b": "row_wise", "c": "table_wise", "d": "row_wise"}
"""No table of every rank: the mean of its gradients is rounded otherwise in two levels."""
CASES = [
    Case(placements=PLACEMENTS, optimizer="SGD"),
    Case(placements=PLACEMENTS, optimizer="Adagrad", fixed=True),
    Case(placements=PLACEMENTS, optimizer="Adagrad", weighted=True),
    Case(placements=PLACEMENTS, optimizer="SGD", pooled=False, dtype=torch.bfloat16),
    Case(placements=PLACEMENTS, optimizer="Adagrad", pooled=False, fixed=True),
]
NUM_STEPS = 4


def made_exchanges() -> dict[str, RankExchange]:
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    return {
        name: TableRanks(mesh, (), WirePrecision(), num_nodes=num_nodes).exchange
        for name, num_nodes in (("flat", 1), ("two levels", NUM_NODES), ("of one", NUM_RANKS))
    }


def announced(ranks: RankExchange, sizes: np.ndarray, *, ahead: bool) -> Sizes:
    """The sizes as ranks tell each other, with a number besides, by which each knows the other."""
    rank = dist.get_rank()
    numbers = torch.from_numpy(np.stack([sizes[rank], 10 * rank + np.arange(NUM_RANKS)], axis=1))
    received, relayed = ranks.announce(numbers, ahead=ahead)
    assert [marker for _, marker in received] == [10 * r + rank for r in range(NUM_RANKS)]
    if relayed is not None:
        node, place = divmod(rank, NUM_RANKS // NUM_NODES)
        assert [[marker for _, marker in of_node] for of_node in relayed] == [
            [10 * (2 * sender + place) + 2 * node + receiver for receiver in range(2)]
            for sender in range(NUM_NODES)
        ]
        relayed = [[size for size, _ in of_node] for of_node in relayed]
    return Sizes(sizes[rank].tolist(), [size for size, _ in received], relayed)


def exchanged(ranks: RankExchange, sizes: np.ndarray) -> list[np.ndarray]:
    """What arrives of ids and vectors that differ by rank, and the gradients of the latter."""
    rank, found = dist.get_rank(), []
    announced_sizes = announced(ranks, sizes, ahead=False)
    assert announced(ranks, sizes, ahead=True) == announced_sizes
    assert announced_sizes.sent == sizes[rank].tolist()
    ids = 1000 * rank + torch.arange(sizes[rank].sum())
    came = ranks.out(ids, announced_sizes)
    assert torch.equal(ranks.back(came, announced_sizes), ids)
    found.append(came.numpy())
    lines, per_line = Lines(announced_sizes, WIDTHS), np.array([sum(each) for each in WIDTHS])
    num_sent = (sizes[rank] * per_line).sum()
    num_received = sizes[:, rank].sum() * per_line[rank]
    for dtype in WIRES:
        wire = WirePrecision(forward=dtype, backward=dtype)
        for send, num_in, num_out in (
            (differentiable_out, num_sent, num_received),
            (differentiable_back, num_received, num_sent),
        ):
            vectors = normal(num_in, seed=rank).requires_grad_()
            arrived = send(vectors, ranks, lines, 0.25, wire)
            (arrived * normal(num_out, seed=7 + rank)).sum().backward()
            assert vectors.grad is not None
            found += [arrived.detach().numpy(), vectors.grad.numpy()]
    return found


def of_products(ranks: RankExchange) -> bool:
    """True where sizes that follow from the ranks' own are those that they would tell."""
    samples, rows = [3, 0, 2, 5], [0, 7, 1, 2]
    sizes = ranks.scaled(ranks.to_all(samples), rows)
    return sizes == announced(ranks, np.outer(samples, rows), ahead=False)


def plan_of(case: Case, num_nodes: int) -> ShardingPlan:
    return dataclasses.replace(case, num_nodes=num_nodes).plan(NUM_RANKS)


def batches_of(case: Case, rank: int) -> list[torchembed.SparseFeatures]:
    """Of several sizes, among them one without samples on any rank."""
    sizes = (None, 4, 0, None)
    return [make_batch(case, rank, step, size) for step, size in enumerate(sizes)]


def loss_of(vectors: Tensor) -> Tensor:
    """Inexact: the bits of a sum depend on its order."""
    return (vectors * normal(vectors.numel(), seed=dist.get_rank())).sum()


class WithLoss(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.tables = model.tables

    def forward(self, features: torchembed.SparseFeatures) -> Tensor:
        return loss_of(vectors_of(self.tables(features)))


def made(case: Case, num_nodes: int, wire: WirePrecision) -> tuple[torch.nn.Module, Any]:
    model = make_model(case, "meta")
    mesh = dataclasses.replace(case, num_nodes=num_nodes).mesh()
    torchembed.shard_embeddings(model, mesh, plan_of(case, num_nodes), wire=wire)
    expected = FlatExchange if num_nodes == 1 else TwoLevelExchange
    assert type(model.tables.ranks.exchange) is expected
    optimizer = getattr(torchembed.optim, case.optimizer)(list(model.parameters()), lr=0.1)
    return model, optimizer


def trained(case: Case, num_nodes: int, wire: WirePrecision) -> list[Any]:
    """Vectors, gradients of weights and rows, after plain steps."""
    model, optimizer = made(case, num_nodes, wire)
    found: list[Any] = []
    for batch in batches_of(case, dist.get_rank()):
        if batch.weights is not None:
            batch.weights.requires_grad_()
        optimizer.zero_grad()
        vectors = vectors_of(model.tables(batch))
        loss_of(vectors).backward()
        optimizer.step()
        found.append(vectors.detach().numpy())
        if batch.weights is not None:
            assert batch.weights.grad is not None
            found.append(batch.weights.grad.numpy())
    return [*found, *leaves(held_rows(model))]


def trained_ahead(case: Case, num_nodes: int) -> list[Any]:
    """Rows after jagged steps, for which a thread has exchanged sizes."""
    model, optimizer = made(case, num_nodes, WirePrecision())
    batches = [make_batch(case, dist.get_rank(), step, 4) for step in range(NUM_STEPS)]
    for each in trained_jagged(WithLoss(model), None, [optimizer], batches):
        assert each.report is not None
    return leaves(held_rows(model))


def leaves(rows: dict[str, Any]) -> list[Any]:
    return [array for _, weight, states in rows.values() for array in (weight, *states)]


def on_a_rank() -> dict[str, list[list[Any]]]:
    """What each test compares: as exchanged at once, and in two levels."""
    exchanges = made_exchanges()
    flat, nested = exchanges["flat"], exchanges["two levels"]
    assert type(nested) is TwoLevelExchange
    # With one rank on each node there is no level within them.
    assert type(exchanges["of one"]) is FlatExchange
    found: dict[str, list[list[Any]]] = {
        f"sizes {number}": [exchanged(ranks, sizes) for ranks in (flat, nested)]
        for number, sizes in enumerate(ALL_SIZES)
    }
    assert of_products(flat) and of_products(nested)
    half = WirePrecision(forward=torch.bfloat16, backward=torch.float16)
    for number, case in enumerate(CASES):
        wire = half if number == 0 else WirePrecision()
        found[f"case {number}"] = [trained(case, num_nodes, wire) for num_nodes in (1, NUM_NODES)]
    found["ahead"] = [trained_ahead(CASES[0], num_nodes) for num_nodes in (1, NUM_NODES)]
    return found


def test_equals_one_all_to_all_bit_for_bit() -> None:
    by_rank = run_on_ranks(NUM_RANKS, on_a_rank)
    for rank, found in enumerate(by_rank):
        for name, (at_once, in_levels) in found.items():
            assert len(at_once) == len(in_levels) > 0, (rank, name)
            for one, other in zip(at_once, in_levels, strict=True):
                np.testing.assert_array_equal(one, other, err_msg=f"rank {rank}, {name}")
    for number, sizes in enumerate(ALL_SIZES):
        for rank, found in enumerate(by_rank):
            starts = [sizes[r, :rank].sum() for r in range(NUM_RANKS)]
            expected = [
                1000 * r + start + place
                for r, start in enumerate(starts)
                for place in range(sizes[r, rank])
            ]
            assert found[f"sizes {number}"][1][0].tolist() == expected
