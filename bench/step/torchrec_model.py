"""DLRM-DCNv2 of TorchRec and FBGEMM, with torchembed's initial weights."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torchrec.datasets.utils import Batch as TorchrecBatch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import QuantizedCommCodecs, ShardingType
from torchrec.models.dlrm import DLRM_DCN, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig as TorchrecConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from bench.data.dlrm_dcnv2 import DenseSizes
from torchembed import EmbeddingBagConfig
from torchembed.data import Batch
from torchembed.integrations.torchrec import EmbeddingBagCollectionSharder as OurSharder

OPTIMIZERS = {
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "sgd": EmbOptimType.EXACT_SGD,
}


class _RowWiseEverywhere:
    """Takes row-wise plans on the CPU too: TorchRec can run them there, but does not offer them."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        types = super().sharding_types(compute_device_type)  # type: ignore[misc]
        return list(dict.fromkeys([*types, ShardingType.ROW_WISE.value]))


class _Sharder(_RowWiseEverywhere, EmbeddingBagCollectionSharder):
    """TorchRec's."""


class _OurSharder(_RowWiseEverywhere, OurSharder):
    """The one line that is changed."""


class _TrainIn16Bits(DLRMTrain):
    """Computes forward and loss under ``torch.autocast``, in bfloat16."""

    def __init__(self, model: DLRM_DCN, device_type: str) -> None:
        super().__init__(model)
        # The device is not taken from the batch, since TorchRec traces forward without one.
        self._device_type = device_type

    def forward(self, batch: TorchrecBatch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        with torch.autocast(self._device_type, torch.bfloat16):
            return super().forward(batch)


class TorchrecModel(NamedTuple):
    """A sharded model that computes its loss, and the optimizer of all of its parameters."""

    model: DistributedModelParallel
    optimizer: CombinedOptimizer


def make_torchrec_model(
    configs: Sequence[EmbeddingBagConfig],
    sizes: DenseSizes,
    dense: Sequence[Tensor],
    *,
    device: torch.device,
    seed: int,
    optimizer: str,
    fused_params: Mapping[str, object],
    dense_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    batch_size: int,
    constraints: Mapping[str, ParameterConstraints],
    codecs: dict[str, QuantizedCommCodecs] | None = None,
    is_drop_in: bool = False,
    in_16_bits: bool = False,
) -> TorchrecModel:
    """TorchRec's model, as its planner places it over all ranks.

    Args:
        configs: the tables, whose rows begin as torchembed's.
        sizes: of the dense part.
        dense: initial values of all dense parameters, in the order of
            :func:`bench.data.dlrm_dcnv2.dense_parameters`.
        device: this rank's.
        seed: of the initial rows.
        optimizer: of the tables, one of ``OPTIMIZERS``.
        fused_params: its learning rate and the like, and what FBGEMM's tables take besides.
        dense_optimizer: makes the optimizer of given dense parameters.
        batch_size: samples of each rank.
        constraints: what the planner must keep to, by table.
        codecs: of the wires.
        is_drop_in: with torchembed's sharder in the place of TorchRec's.
        in_16_bits: compute the dense part in bfloat16, by ``torch.autocast``, and on GPUs average
            its gradients in bfloat16.
    """
    tables = [
        TorchrecConfig(
            name=config.name,
            num_embeddings=config.num_embeddings,
            embedding_dim=config.embedding_dim,
            feature_names=list(config.feature_names),
        )
        for config in configs
    ]
    collection = EmbeddingBagCollection(tables, device=torch.device("meta"))
    dlrm = DLRM_DCN(
        collection,
        sizes.num_dense,
        list(sizes.dense_arch),
        list(sizes.over_arch),
        sizes.num_cross_layers,
        sizes.low_rank,
        dense_device=device,
    )
    sharder: Any = (_OurSharder if is_drop_in else _Sharder)(
        fused_params={"optimizer": OPTIMIZERS[optimizer], **fused_params},
        qcomm_codecs_registry=codecs,
    )
    model = _TrainIn16Bits(dlrm, device.type) if in_16_bits else DLRMTrain(dlrm)
    num_ranks = dist.get_world_size()
    memory = 0.9 * torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=num_ranks,
            local_world_size=num_ranks,
            compute_device=device.type,
            hbm_cap=None if memory is None else int(memory),
        ),
        batch_size=batch_size,
        constraints=dict(constraints),
    )
    plan = planner.collective_plan(model, [sharder], dist.GroupMember.WORLD)
    sharded = DistributedModelParallel(model, device=device, plan=plan, sharders=[sharder])
    if in_16_bits and num_ranks > 1 and device.type == "cuda":
        data_parallel = sharded._dmp_wrapped_module
        assert isinstance(data_parallel, DistributedDataParallel)
        data_parallel.register_comm_hook(None, bf16_compress_hook)
    for config, value in torchrec_tables(sharded, configs):
        spec = config.spec(seed)
        for row, column, rows in local_shards(value):
            row_ids = range(row, row + rows.shape[0])
            spec.initializer.fill(rows, spec.key, row_ids, column, spec.num_rows)
    with torch.no_grad():
        for parameter, given in zip(torchrec_dense(sharded), dense, strict=True):
            parameter.copy_(given)
    own: dict[str, Any] = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    of_dense = KeyedOptimizerWrapper(own, dense_optimizer)
    return TorchrecModel(sharded, CombinedOptimizer([sharded.fused_optimizer, of_dense]))


def torchrec_tables(
    model: DistributedModelParallel, configs: Sequence[EmbeddingBagConfig]
) -> list[tuple[EmbeddingBagConfig, Tensor | ShardedTensor]]:
    """Each table's weight as ``state_dict`` has it: sharded, or whole on this rank."""
    state = model.state_dict()
    found = []
    for config in configs:
        (name,) = (key for key in state if key.endswith(f".{config.name}.weight"))
        found.append((config, state[name]))
    return found


def local_shards(value: Tensor | ShardedTensor) -> list[tuple[int, int, Tensor]]:
    """This rank's shards of a table's weight: first row, first column, and the memory itself."""
    if not isinstance(value, ShardedTensor):
        return [(0, 0, value)]
    shards = []
    for shard in value.local_shards():
        first_row, first_column = shard.metadata.shard_offsets
        shards.append((first_row, first_column, shard.tensor))
    return shards


def torchrec_dense(model: DistributedModelParallel) -> list[Tensor]:
    """The dense parameters, as :func:`bench.data.dlrm_dcnv2.dense_parameters` has torchembed's."""
    parts = ("dense_arch", "V_kernels", "W_kernels", "crossnet.bias", "over_arch")
    named = [(k, p) for k, p in model.named_parameters() if "embedding_bags" not in k]
    return [parameter for part in parts for name, parameter in named if part in name]


def as_torchrec(batch: Batch) -> TorchrecBatch:
    """A batch of fixed hotness in TorchRec's form."""
    sparse = batch.sparse
    lengths = torch.tensor(sparse.hotness, dtype=torch.int32, device=sparse.values.device)
    features = KeyedJaggedTensor(
        keys=list(sparse.keys),
        values=sparse.values,
        lengths=lengths.repeat_interleave(sparse.batch_size),
    )
    assert batch.dense is not None
    return TorchrecBatch(batch.dense, features, batch.labels)
