"""DLRM-DCNv2 trained by TorchRec and FBGEMM: the peer of ``bench.step.train_step``."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import Tensor
from torchrec.datasets.utils import Batch as TorchrecBatch
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineFusedSparseDist

from bench.data import dlrm_dcnv2 as workload
from bench.step.setting import StepSetting
from bench.step.torchrec_model import as_torchrec, make_torchrec_model
from torchembed.data import Batch
from torchembed.integrations.torchrec import TrainPipeline
from torchembed.sharding import WireTransport


def _fused_params(setting: StepSetting) -> dict[str, object]:
    """The settings of the tables; in 16-bit precision they give vectors in bfloat16, as ours do."""
    numbers: dict[str, object] = {"learning_rate": setting.lr, "eps": setting.eps}
    if setting.precision == "bf16":
        numbers["output_dtype"] = SparseType.BF16
    return numbers


class TorchrecStep:
    """A model, its planner's plan, and a pipeline over batches in pinned memory.

    Args:
        setting: what to train; in a ``precision`` of bf16 under ``torch.autocast``.
        dense: the initial values of all dense parameters, in the order of
            :func:`bench.data.dlrm_dcnv2.dense_parameters`.
        is_tuned: vectors and gradients are exchanged in fp16, by ``TrainPipelineFusedSparseDist``.
        is_drop_in: with torchembed's sharder in the place of TorchRec's.
        is_our_pipeline: with torchembed's pipeline in the place of TorchRec's, too.
    """

    def __init__(
        self,
        setting: StepSetting,
        dense: Sequence[Tensor],
        *,
        is_tuned: bool = False,
        is_drop_in: bool = False,
        is_our_pipeline: bool = False,
    ) -> None:
        codecs = None
        if is_tuned:
            wire = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16)
            codecs = get_qcomm_codecs_registry(wire, device=setting.device)
        self.model, optimizer = make_torchrec_model(
            workload.table_configs(setting.max_rows),
            workload.DENSE_SIZES,
            dense,
            device=setting.device,
            seed=setting.seed,
            optimizer=setting.optimizer,
            fused_params=_fused_params(setting),
            dense_optimizer=setting.dense_optimizer,
            batch_size=setting.batch_size,
            constraints={
                key: ParameterConstraints(compute_kernels=["fused"], pooling_factors=[float(count)])
                for key, count in zip(workload.KEYS, workload.HOTNESS, strict=True)
            },
            codecs=codecs,
            is_drop_in=is_drop_in or is_our_pipeline,
            in_16_bits=setting.precision == "bf16",
        )
        pipeline: Any = TrainPipelineFusedSparseDist if is_tuned else TrainPipelineSparseDist
        if is_our_pipeline:
            transport = WireTransport(setting.transport)
            pipeline = functools.partial(TrainPipeline, transport=transport)
        self._pipeline = pipeline(self.model, optimizer, setting.device)
        self._is_ours = is_our_pipeline

    @staticmethod
    def batch(batch: Batch, device: torch.device) -> TorchrecBatch:
        """TorchRec's form of a batch, in pinned memory for a GPU."""
        made = as_torchrec(batch)
        return made.pin_memory() if device.type == "cuda" else made

    def step(self, batches: Iterator[TorchrecBatch]) -> Tensor:
        """The loss of one step, on the device."""
        loss, _, _ = self._pipeline.progress(batches)
        return loss

    num_input_stalls = 0
    """It has no count of its own; its batches lie ready too."""

    def close(self) -> None:
        """Destroy graphs; TorchRec's pipelines have none."""
        if self._is_ours:
            self._pipeline.close()
