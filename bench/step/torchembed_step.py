"""DLRM-DCNv2 trained by torchembed, for ``bench.step.train_step``."""

import dataclasses
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from bench.data import dlrm_dcnv2 as workload
from bench.planning.step_costs import (
    NO_BOUND,
    make_planner,
    placements_of,
    predicted_ms,
    wire_precision,
)
from bench.step.model_optimizers import half_precision, make_optimizers
from bench.step.setting import StepSetting
from bench.step.stages import stage_milliseconds
from torchembed import Dynamic, plan_embeddings, shard_embeddings
from torchembed.data import Batch
from torchembed.modules import use_float8_products
from torchembed.ops.binary_cross_entropy import binary_cross_entropy
from torchembed.sharding import CPU, Topology, WireTransport
from torchembed.sharding.planning.topology import GPUS
from torchembed.training import TrainPipeline

_ROW_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class TorchembedStep:
    """A model, the planner's plan, and a pipeline over batches in pinned memory.

    Args:
        setting: what is measured.
        dynamic: of all tables; None for static ones.
    """

    def __init__(self, setting: StepSetting, dynamic: Dynamic | None = None) -> None:
        device, num_ranks = setting.device, dist.get_world_size()
        half = half_precision(setting)
        self.model = workload.make_model(
            workload.table_configs(setting.max_rows, dynamic, dtype=_ROW_DTYPES[setting.rows]),
            workload.DENSE_SIZES,
            table_device=device if num_ranks == 1 else "meta",
            device=device,
            seed=setting.seed,
            output_dtype=torch.float32 if half is None else half,
        )
        if setting.precision == "fp8":
            use_float8_products(self.model)
        planner = make_planner(
            setting.batch_size, setting.ids, setting.optimizer, setting.precision, setting.max_rows
        )
        wire, mesh = wire_precision(setting.wire), None
        if num_ranks > 1:
            mesh = init_device_mesh(device.type, (num_ranks,))
        else:
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
            hardware = next((known for known in GPUS if known.name in name), CPU)
            topology = Topology.of_hardware(hardware, ranks_per_node=1)
            topology = dataclasses.replace(topology, memory_bytes=NO_BOUND)
            planner = dataclasses.replace(planner, topology=topology)
        transport = WireTransport(setting.transport)
        report = plan_embeddings(self.model, planner, mesh, wire=wire, transport=transport)
        self.predicted = {
            "predicted_ms": predicted_ms(report),
            "placements": placements_of(report.plan),
        }
        """The prediction of the cost model, and the plan, for a row of results."""
        if mesh is not None:
            shard_embeddings(self.model, mesh, plan=planner, wire=wire, transport=transport)
        self._of_tables, self._of_dense = make_optimizers(self.model, setting)
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
        """Measure the stages of a step on ``batch`` one after the other, in milliseconds; on
        GPUs."""
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
