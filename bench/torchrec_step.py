"""DLRM-DCNv2 trained by TorchRec and FBGEMM: the peer of ``bench.train_step``."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec.datasets.utils import Batch as TorchrecBatch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineFusedSparseDist
from torchrec.models.dlrm import DLRM_DCN, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from bench import dlrm_dcnv2 as workload
from bench.step_setting import StepSetting
from torchembed.data import Batch

OPTIMIZERS = {
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "sgd": EmbOptimType.EXACT_SGD,
}


class TorchrecStep:
    """A model, its planner's plan, and a pipeline over batches in pinned memory.

    Args:
        setting: what to train. TorchRec runs in tf32, its fastest here, whatever ``precision`` is.
        dense: the initial values of all dense parameters, in the order of
            :func:`bench.step_setting.dense_parameters`.
        is_tuned: vectors and gradients travel in fp16, through ``TrainPipelineFusedSparseDist``.
    """

    def __init__(self, setting: StepSetting, dense: Sequence[Tensor], *, is_tuned: bool) -> None:
        device = setting.device
        tables = [
            EmbeddingBagConfig(
                name=config.name,
                num_embeddings=config.num_embeddings,
                embedding_dim=config.embedding_dim,
                feature_names=list(config.feature_names),
            )
            for config in workload.table_configs(setting.max_rows)
        ]
        collection = EmbeddingBagCollection(tables, device=torch.device("meta"))
        dlrm = DLRM_DCN(
            collection,
            workload.NUM_DENSE,
            list(workload.DENSE_ARCH),
            list(workload.OVER_ARCH),
            workload.NUM_CROSS_LAYERS,
            workload.LOW_RANK,
            dense_device=device,
        )
        codecs = None
        if is_tuned:
            wire = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16)
            codecs = get_qcomm_codecs_registry(wire, device=device)
        sharder: Any = EmbeddingBagCollectionSharder(
            fused_params={
                "optimizer": OPTIMIZERS[setting.optimizer],
                "learning_rate": setting.lr,
                "eps": setting.eps,
            },
            qcomm_codecs_registry=codecs,
        )
        model = DLRMTrain(dlrm)
        num_ranks = dist.get_world_size()
        memory = 0.9 * torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None
        planner = EmbeddingShardingPlanner(
            topology=Topology(
                world_size=num_ranks,
                local_world_size=num_ranks,
                compute_device=device.type,
                hbm_cap=None if memory is None else int(memory),
            ),
            batch_size=setting.batch_size,
            constraints={
                key: ParameterConstraints(compute_kernels=["fused"], pooling_factors=[float(count)])
                for key, count in zip(workload.KEYS, workload.HOTNESS, strict=True)
            },
        )
        plan = planner.collective_plan(model, [sharder], dist.GroupMember.WORLD)
        self.model = DistributedModelParallel(model, device=device, plan=plan, sharders=[sharder])
        self._fill_rows(workload.table_configs(setting.max_rows), setting.seed)
        found = {name: p for name, p in dlrm.named_parameters() if "embedding_bags" not in name}
        with torch.no_grad():
            for parameter, given in zip(_dense_in_order(found), dense, strict=True):
                parameter.copy_(given)
        own: dict[str, Any] = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        dense_optimizer = KeyedOptimizerWrapper(own, setting.dense_optimizer)
        optimizer = CombinedOptimizer([self.model.fused_optimizer, dense_optimizer])
        pipeline = TrainPipelineFusedSparseDist if is_tuned else TrainPipelineSparseDist
        self._pipeline = pipeline(self.model, optimizer, device)

    def _fill_rows(self, configs: Sequence, seed: int) -> None:
        """Give the rows the initial values that torchembed's have."""
        state = self.model.state_dict()
        for config in configs:
            (name,) = (key for key in state if key.endswith(f".{config.name}.weight"))
            spec = config.spec(seed)
            value = state[name]
            shards = value.local_shards() if hasattr(value, "local_shards") else None
            if shards is None:
                spec.initializer.fill(value, spec.key, 0, 0, spec.num_rows)
                continue
            for shard in shards:
                row, column = shard.metadata.shard_offsets
                spec.initializer.fill(shard.tensor, spec.key, row, column, spec.num_rows)

    @staticmethod
    def batch(batch: Batch, device: torch.device) -> TorchrecBatch:
        """TorchRec's form of a batch, in pinned memory for a GPU."""
        sparse = batch.sparse
        lengths = torch.tensor(sparse.hotness, dtype=torch.int32)
        features = KeyedJaggedTensor(
            keys=list(sparse.keys),
            values=sparse.values,
            lengths=lengths.repeat_interleave(sparse.batch_size),
        )
        made = TorchrecBatch(batch.dense, features, batch.labels)
        return made.pin_memory() if device.type == "cuda" else made

    def step(self, batches: Iterator[TorchrecBatch]) -> Tensor:
        """The loss of one step, on the device."""
        loss, _, _ = self._pipeline.progress(batches)
        return loss


def _dense_in_order(parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """The dense parameters as :func:`bench.step_setting.dense_parameters` has torchembed's."""
    parts = ("dense_arch", "V_kernels", "W_kernels", "crossnet.bias", "over_arch")
    return [p for part in parts for name, p in parameters.items() if part in name]
