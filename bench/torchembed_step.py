"""DLRM-DCNv2 trained by torchembed, for ``bench.train_step``."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from bench import dlrm_dcnv2 as workload
from bench.step_setting import StepSetting
from torchembed import optim, shard_embeddings
from torchembed.data import Batch
from torchembed.sharding import Planner, WirePrecision, WireTransport
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
        self.initial_dense = [p.detach().clone() for p in workload.dense_parameters(self.model)]
        of_tables, of_dense = OPTIMIZERS[setting.optimizer]
        if num_ranks > 1:
            mesh = init_device_mesh(device.type, (num_ranks,))
            planner = Planner(
                batch_size=setting.batch_size,
                hotness=dict(zip(workload.KEYS, workload.HOTNESS, strict=True)),
                optimizer=of_tables,
                fixed_hotness=True,
            )
            wire = torch.bfloat16 if setting.wire == "bf16" else torch.float32
            precision = WirePrecision(forward=wire, backward=wire, dense=wire)
            transport = WireTransport(setting.transport)
            shard_embeddings(self.model, mesh, plan=planner, wire=precision, transport=transport)
        tables = [p for p in self.model.parameters() if table_of(p) is not None]
        dense = [p for p in self.model.parameters() if table_of(p) is None]
        numbers = {"lr": setting.lr}
        if setting.optimizer != "sgd":
            numbers["eps"] = setting.eps
        half = torch.bfloat16 if setting.precision == "bf16" else None
        optimizers = [
            of_tables(tables or [{"params": []}], **numbers),
            of_dense(dense, **numbers, dtype=half),
        ]
        self._pipeline = TrainPipeline(
            self.model, F.binary_cross_entropy_with_logits, optimizers, autocast=half
        )

    @staticmethod
    def batch(batch: Batch, device: torch.device) -> Batch:
        """The batch in pinned memory for a GPU."""
        return batch.pin_memory() if device.type == "cuda" else batch

    def step(self, batches: Iterator[Batch]) -> Tensor:
        """The loss of one step, on the device."""
        return self._pipeline.progress(batches).loss

    def close(self) -> None:
        """Destroy the graphs."""
        self._pipeline.close()
