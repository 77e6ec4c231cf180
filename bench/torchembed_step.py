"""DLRM-DCNv2 trained by torchembed, for ``bench.train_step``."""

import dataclasses
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from bench import dlrm_dcnv2 as workload
from bench.step_setting import StepSetting
from bench.step_stages import stage_milliseconds
from torchembed import optim, plan_embeddings, shard_embeddings
from torchembed.data import Batch
from torchembed.ops.binary_cross_entropy import binary_cross_entropy
from torchembed.sharding import (
    CPU,
    H100,
    H200,
    Planner,
    Topology,
    WirePrecision,
    WireTransport,
)
from torchembed.tables import table_of
from torchembed.training import TrainPipeline

OPTIMIZERS = {
    "adagrad": (optim.Adagrad, optim.DenseAdagrad),
    "rowwise_adagrad": (optim.RowwiseAdagrad, optim.DenseAdagrad),
    "sgd": (optim.SGD, optim.DenseSGD),
}
"""Of tables, and of the dense part."""


class TorchembedStep:
    """A model, the planner's plan, and a pipeline over batches in pinned memory."""

    def __init__(self, setting: StepSetting) -> None:
        device, num_ranks = setting.device, dist.get_world_size()
        self.model = workload.make_model(
            workload.table_configs(setting.max_rows),
            workload.DENSE_SIZES,
            table_device=device if num_ranks == 1 else "meta",
            device=device,
            seed=setting.seed,
            output_dtype=torch.bfloat16 if setting.precision == "bf16" else torch.float32,
        )
        of_tables, of_dense = OPTIMIZERS[setting.optimizer]
        planner = Planner(
            batch_size=setting.batch_size,
            hotness=dict(zip(workload.KEYS, workload.HOTNESS, strict=True)),
            distinct_ids=workload.distinct_ids(setting.ids, setting.batch_size, setting.max_rows),
            optimizer=of_tables,
            fixed_hotness=True,
        )
        wire = torch.bfloat16 if setting.wire == "bf16" else torch.float32
        precision = WirePrecision(forward=wire, backward=wire, dense=wire)
        self.predicted_ms = _predicted_ms(self.model, planner, precision, device)
        """Of the slowest rank, by the stages of :mod:`bench.step_stages`."""
        if num_ranks > 1:
            mesh = init_device_mesh(device.type, (num_ranks,))
            transport = WireTransport(setting.transport)
            shard_embeddings(self.model, mesh, plan=planner, wire=precision, transport=transport)
        tables = [p for p in self.model.parameters() if table_of(p) is not None]
        dense = [p for p in self.model.parameters() if table_of(p) is None]
        numbers = {"lr": setting.lr}
        if setting.optimizer != "sgd":
            numbers["eps"] = setting.eps
        half = torch.bfloat16 if setting.precision == "bf16" else None
        self._of_tables = of_tables(tables or [{"params": []}], **numbers)
        self._of_dense = of_dense(dense, **numbers, dtype=half)
        self._autocast = torch.autocast(device.type, half, enabled=half is not None)
        self._pipeline = TrainPipeline(
            self.model,
            binary_cross_entropy,
            [self._of_tables, self._of_dense],
            autocast=half,
        )

    @staticmethod
    def batch(batch: Batch, device: torch.device) -> Batch:
        """The batch in pinned memory for a GPU."""
        return batch.pin_memory() if device.type == "cuda" else batch

    def step(self, batches: Iterator[Batch]) -> Tensor:
        """The loss of one step, on the device."""
        return self._pipeline.progress(batches).loss

    def alone_ms(self, batch: Batch, device: torch.device) -> dict[str, float]:
        """What the stages of a step on ``batch`` take one after the other, on GPUs."""
        self._pipeline.close()
        dense, sparse, labels = batch.to(device)
        losses: list[Tensor] = []

        def forward() -> None:
            self._of_tables.zero_grad()
            self._of_dense.zero_grad()
            with self._autocast:
                losses[:] = [binary_cross_entropy(self.model(dense, sparse).squeeze(-1), labels)]

        def backward() -> None:
            losses[0].backward()

        return stage_milliseconds(
            {
                "forward": forward,
                "backward": backward,
                "rows": self._of_tables.step,
                "dense": self._of_dense.step,
            }
        )

    @property
    def num_input_stalls(self) -> int:
        return self._pipeline.input_stalls.count

    def close(self) -> None:
        """Destroy the graphs."""
        self._pipeline.close()


def _predicted_ms(
    model: nn.Module, planner: Planner, wire: WirePrecision, device: torch.device
) -> dict[str, float]:
    """What the planner's cost model says of the tables' stages where memory is no bound."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known = [hardware for hardware in (H100, H200) if hardware.name in name]
    topology = Topology.of_hardware(
        known[0] if known else CPU, ranks_per_node=dist.get_world_size()
    )
    topology = dataclasses.replace(topology, memory_bytes=1 << 60)
    report = plan_embeddings(model, dataclasses.replace(planner, topology=topology), wire=wire)
    slowest = max(report.ranks, key=lambda rank: rank.seconds)
    wires = slowest.ids_seconds + slowest.vectors_seconds + slowest.gradients_seconds
    return {
        "lookup": 1e3 * slowest.lookup_seconds,
        "row update": 1e3 * slowest.update_seconds,
        "exchange": 1e3 * wires,
        "mean": 1e3 * slowest.all_reduce_seconds,
    }
