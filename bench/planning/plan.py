"""Plans DLRM-DCNv2 of MLPerf for some number of ranks, says what the plan costs, and draws it.

``python -m bench.planning.plan --num-ranks 8``. No rank and no GPU is needed.
"""

import dataclasses
import time
from pathlib import Path
from typing import Literal

import torch
import tyro

from bench.data.dlrm_dcnv2 import distinct_ids
from torchembed import EmbeddingBagCollection, EmbeddingBagConfig, optim, plan_embeddings
from torchembed.data import MLPERF_HOTNESS, MLPERF_TABLE_SIZES
from torchembed.sharding import H100, H200, Host, NodeDisk, Planner, Topology, draw_plan

DIM = 128
HARDWARE = {hardware.name: hardware for hardware in (H100, H200)}
OPTIMIZERS = {kind.__name__: kind for kind in (optim.Adagrad, optim.RowwiseAdagrad, optim.SGD)}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the plan."""

    num_ranks: int = 8
    ranks_per_node: int = 8
    """Fewer where there are fewer ranks."""
    hardware: Literal["H100", "H200"] = "H200"
    memory_gib: float | None = None
    """Memory of each rank for tables and buffers; what the hardware has where None."""
    host_gib: float = 0.0
    """Memory of each node for tables that its ranks have no room for."""
    disk_gib: float = 0.0
    """Disk of each node for tables that neither has room for."""
    batch_size: int = 8192
    """Samples of each rank."""
    ids: Literal["uniform", "zipf"] = "uniform"
    """The law of ids, and so the number of different ones in a batch: uniform, or Zipf's of
    exponent 1.05."""
    optimizer: Literal["Adagrad", "RowwiseAdagrad", "SGD"] = "Adagrad"
    tables: Literal["fp32", "fp16", "bf16"] = "fp32"
    vectors: Literal["fp32", "fp16", "bf16"] = "bf16"
    """Pooled vectors and their gradients, also on the wire."""
    fixed_hotness: bool = False
    """Plan for batches without offsets."""
    max_imbalance: float = 1.15
    """Limit of the slowest rank's time over the mean; "inf" gives the fastest plan. Up to 16 ranks
    both are the same."""
    picture: Path | None = None
    """PNG to draw."""
    json: Path | None = None
    """File to write the plan to."""

    def topology(self) -> Topology:
        per_node = min(self.num_ranks, self.ranks_per_node)
        if self.num_ranks % per_node:
            raise ValueError(
                f"num_ranks must be a multiple of the {per_node} ranks of a node, got "
                f"{self.num_ranks}"
            )
        disk = NodeDisk()
        if self.disk_gib:
            disk = NodeDisk(path="rows", capacity_bytes=int(self.disk_gib * 2**30))
        topology = Topology.of_hardware(
            HARDWARE[self.hardware],
            ranks_per_node=per_node,
            num_nodes=self.num_ranks // per_node,
            host=Host(memory_bytes=int(self.host_gib * 2**30)),
            disk=disk,
        )
        if self.memory_gib is None:
            return topology
        return dataclasses.replace(topology, memory_bytes=int(self.memory_gib * 2**30))


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    tables = [
        EmbeddingBagConfig(
            name=f"cat_{number}",
            num_embeddings=num_rows,
            embedding_dim=DIM,
            feature_names=(f"cat_{number}",),
            dtype=DTYPES[config.tables],
        )
        for number, num_rows in enumerate(MLPERF_TABLE_SIZES)
    ]
    output_dtype = DTYPES[config.vectors]
    planner = Planner(
        batch_size=config.batch_size,
        hotness={f"cat_{number}": count for number, count in enumerate(MLPERF_HOTNESS)},
        distinct_ids=distinct_ids(config.ids, config.batch_size, max_rows=None),
        optimizer=OPTIMIZERS[config.optimizer],
        fixed_hotness=config.fixed_hotness,
        max_imbalance=config.max_imbalance,
        topology=config.topology(),
    )
    start = time.process_time()
    model = EmbeddingBagCollection(tables, device="meta", output_dtype=output_dtype)
    try:
        report = plan_embeddings(model, planner)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    seconds = time.process_time() - start
    print(report)
    print(
        f"DLRM-DCNv2, {config.tables} tables, {config.optimizer}, {config.vectors} vectors, "
        f"{config.hardware}; planned in {seconds:.2f} s of one core"
    )
    if config.picture is not None:
        title = f"DLRM-DCNv2 on {config.num_ranks} {config.hardware}, {config.optimizer}"
        draw_plan(report, config.picture, title=title)
        print(f"picture: {config.picture}")
    if config.json is not None:
        config.json.write_text(report.plan.to_json())
        print(f"plan: {config.json}")


if __name__ == "__main__":
    main()
