"""A planner that places tables on disk, in ``shard_embeddings`` on real ranks."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torchembed
from tests.support.planning import make_topology
from tests.support.ranks import run_on_ranks
from torchembed import Disk, EmbeddingBagConfig, SparseFeatures
from torchembed.optim import Adagrad
from torchembed.sharding import Host, NodeDisk, Planner

NUM_ROWS, DIM, BATCH_SIZE, NUM_STEPS = 4000, 16, 8, 6
WHOLE = NUM_ROWS * DIM * 4 * 2
"""Bytes of a table with Adagrad's state."""


def make_model() -> nn.Module:
    model = nn.Module()
    model.tables = torchembed.EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=name, num_embeddings=NUM_ROWS, embedding_dim=DIM, feature_names=(name,)
            )
            for name in ("a", "b", "c")
        ],
        device="meta",
    )
    return model


def make_batch(step: int) -> SparseFeatures:
    generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
    values = torch.randint(NUM_ROWS, (3 * BATCH_SIZE,), generator=generator)
    # Some rows come again.
    values[::3] = values[::3] % 5
    return SparseFeatures(
        keys=("a", "b", "c"), values=values, batch_size=BATCH_SIZE, hotness=(1, 1, 1)
    )


def trained(model: nn.Module) -> list[list[float]]:
    """The vectors of each step's batch."""
    optimizer = Adagrad(model.parameters(), lr=0.1)
    vectors = []
    for step in range(NUM_STEPS):
        pooled = model.tables(make_batch(step % 4)).values()
        pooled.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        vectors.append(pooled.detach().flatten().tolist())
    return vectors


def on_two_ranks(folder: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    topology = dataclasses.replace(
        make_topology(1, 2, memory_bytes=WHOLE // 5),
        host=Host(memory_bytes=WHOLE * 7 // 20),
        disk=NodeDisk(path=folder),
    )
    planner = Planner(batch_size=BATCH_SIZE, topology=topology)
    report = torchembed.plan_embeddings(make_model(), planner, mesh)
    on_disk = torchembed.shard_embeddings(make_model(), mesh, planner)
    on_devices = dataclasses.replace(
        report.plan,
        tables=tuple(dataclasses.replace(table, storage=None) for table in report.plan.tables),
    )
    return {
        "found": trained(on_disk),
        "expected": trained(torchembed.shard_embeddings(make_model(), mesh, on_devices)),
        "storages": [table.storage for table in report.plan.tables],
        "written": [rank.disk_bytes for rank in report.ranks],
    }


def test_tables_that_a_planner_places_on_disk_train_as_on_devices(tmp_path: Path) -> None:
    """Of a model of four times the memory of both devices and their host."""
    results = run_on_ranks(2, on_two_ranks, str(tmp_path))
    for result in results:
        assert result["storages"] == results[0]["storages"]
        assert all(isinstance(storage, Disk) for storage in result["storages"])
        assert result["found"] == result["expected"]
        assert sum(result["written"]) == 3 * WHOLE
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank_0_of_2", "rank_1_of_2"]
