"""Costs of the dense part, by hand, and which part of a model it is."""

import dataclasses
import functools

import pytest
import torch
from torch import nn

import torchembed
from tests.support.planning import cost_model, make_topology
from tests.support.tolerance import relative_error
from torchembed import optim
from torchembed.sharding import Planner, WirePrecision
from torchembed.sharding.planning.dense_costs import DenseUse, dense_cost

# 2 layers of 1000 weights, 100 biases; 1 and 3 MB on the wire, each way within a node and between.
USE = DenseUse(num_parameters=1100, num_layers=2, num_weights=1000, dtype=torch.bfloat16)
TOPOLOGY = dataclasses.replace(
    make_topology(1, 4), kernel_seconds=1e-6, exchange_seconds=2e-6, peer_seconds=1e-6, flops=1e9
)
PLANNER = Planner(batch_size=8)

near = functools.partial(pytest.approx, rel=relative_error(64, torch.float64), abs=0)
"""Costs are sums of products of positive numbers, of fewer roundings than that."""


def test_by_hand() -> None:
    cost = dense_cost(USE, cost_model(PLANNER, TOPOLOGY))
    products = 2 * 1000 * 8 / 1e9
    assert cost.forward_seconds == near(products + 2 * 0.85e-6)
    assert cost.backward_seconds == near(2 * products + 3e-6)
    # One bucket: 3 / 4 of the bytes twice at 1e8 a second, 1.5 exchanges of 2 + 4 us.
    assert cost.mean_seconds == near(2 * 0.75 * 2200 / 1e8 + 9e-6)
    # Adagrad: gradients and rounded weights of 2 bytes, masters and sums read and written.
    assert cost.update_seconds == near(1100 * 20 / 1e9 + 1e-6)


def test_by_precision_optimizer_and_wire() -> None:
    full = dataclasses.replace(USE, dtype=torch.float32, num_parameters=1 << 20)
    planner = dataclasses.replace(PLANNER, optimizer=optim.SGD)
    wire = WirePrecision(dense=torch.bfloat16)
    narrow = dense_cost(full, cost_model(planner, TOPOLOGY, wire))
    # 4 MiB of gradients are one bucket; 4 bytes more are two.
    assert narrow.mean_seconds == near(1.5 * (1 << 21) / 1e8 + 9e-6)
    more = dataclasses.replace(full, num_parameters=(1 << 20) + 1)
    assert dense_cost(more, cost_model(planner, TOPOLOGY)).mean_seconds == near(
        1.5 * ((1 << 22) + 4) / 1e8 + 18e-6
    )
    assert narrow.update_seconds == near((1 << 20) * 12 / 1e9 + 1e-6)
    tf32 = dense_cost(dataclasses.replace(full, allows_tf32=True), cost_model(planner, TOPOLOGY))
    half = dense_cost(USE, cost_model(planner, TOPOLOGY))
    assert half.forward_seconds < tf32.forward_seconds < narrow.forward_seconds
    alone = dense_cost(full, cost_model(planner, make_topology(1, 1)))
    assert alone.mean_seconds == 0.0
    assert alone.forward_seconds == 0.0  # of a topology that knows no rate


def test_several_nodes_average_in_as_few_buckets_as_their_meetings_ask_for() -> None:
    topology = dataclasses.replace(make_topology(2, 4), exchange_seconds=0.1, peer_seconds=0.1)
    met = 1.5 * (2 * 0.1 + 0.4 + 0.2)  # as long as 30 MB, at 40 ns a byte
    full = dataclasses.replace(USE, dtype=torch.float32)
    for num_parameters, num_buckets in ((1 << 20, 1), (1 << 24, 1), (1 << 25, 2), (1 << 26, 3)):
        use = dataclasses.replace(full, num_parameters=num_parameters)
        cost = dense_cost(use, cost_model(PLANNER, topology))
        assert cost.num_buckets == num_buckets
        assert cost.mean_seconds == near(num_parameters * 4 * 40e-9 + num_buckets * met)
    # In 16 bits half as much is sent, so that one bucket does.
    wire = WirePrecision(dense=torch.bfloat16)
    use = dataclasses.replace(full, num_parameters=1 << 24)
    assert dense_cost(use, cost_model(PLANNER, topology, wire)).num_buckets == 1
    assert dense_cost(use, cost_model(PLANNER, make_topology(2, 4))).num_buckets == 16
    assert dense_cost(use, cost_model(PLANNER, TOPOLOGY)).num_buckets == 16


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = torchembed.EmbeddingBagConfig(
            name="t", num_embeddings=10, embedding_dim=4, feature_names=("f",)
        )
        self.bags = torchembed.EmbeddingBagCollection([config], device="meta")
        self.own = torchembed.EmbeddingBag(50, 4)
        self.torchs = nn.Embedding(20, 4)
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 1))


def test_what_of_a_model_is_dense() -> None:
    """Matrices that samples are multiplied with, and what is averaged and updated whole."""
    planner = dataclasses.replace(PLANNER, topology=TOPOLOGY, autocast=torch.bfloat16)
    report = torchembed.plan_embeddings(Model(), planner)
    use = DenseUse(
        num_parameters=20 * 4 + 15 + 6 + 4, num_layers=2, num_weights=15, dtype=torch.bfloat16
    )
    assert report.dense == dense_cost(use, cost_model(PLANNER, TOPOLOGY))
    line = next(line for line in str(report).splitlines() if line.startswith("dense part, ms: "))
    assert line.startswith("dense part, ms: 0.002 forward, 0.00")
    assert line.endswith(" update")
    assert torchembed.plan_embeddings(Model().bags, planner).dense is None
