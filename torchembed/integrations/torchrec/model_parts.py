"""TorchRec models taken apart, and which of them our pipeline can train."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardedModule, ShardingType
from torchrec.modules.embedding_configs import PoolingType

from torchembed.integrations.torchrec.adopted import output_dtypes, plans_of, shardings_of
from torchembed.integrations.torchrec.sharded import (
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
)
from torchembed.integrations.torchrec.versions import grouped_configs
from torchembed.integrations.torchrec.wires import wire_of
from torchembed.sharding.wire import WirePrecision

_OURS = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)


class Parts(NamedTuple):
    """What a model for training is made of."""

    inner: nn.Module
    """Without what ``DistributedModelParallel`` and ``DistributedDataParallel`` put around it."""
    ddp: DistributedDataParallel | None
    collections: list[tuple[str, Any]]
    """Those over our tables."""

    @property
    def wire(self) -> WirePrecision:
        """How its vectors and gradients travel."""
        wire = wire_of(self.collections[0][1].qcomm_codecs_registry)
        assert not isinstance(wire, str)
        hooks = [] if self.ddp is None else self.ddp._comm_hooks
        dense = torch.bfloat16 if hooks else None
        return WirePrecision(forward=wire.forward, backward=wire.backward, dense=dense)

    def dense_parameters(self) -> dict[str, nn.Parameter]:
        """Those that are in no collection, by all of their names."""
        inside = tuple(f"{name}." for name, _ in self.collections)
        named = self.inner.named_parameters(remove_duplicate=False)
        return {name: p for name, p in named if not name.startswith(inside)}

    def averaged_parameters(self) -> list[nn.Parameter]:
        """The dense ones whose gradients ``DistributedDataParallel`` would average."""
        if self.ddp is None:
            return []
        left_out = self.ddp.parameters_to_ignore
        return [p for name, p in self.dense_parameters().items() if name not in left_out]


def parts_of(model: nn.Module) -> Parts:
    """Take ``model`` apart."""
    inner: Any = model
    ddp = None
    if isinstance(inner, DistributedModelParallel):
        inner = inner._dmp_wrapped_module
    if isinstance(inner, DistributedDataParallel):
        ddp, inner = inner, inner.module
    collections = [(name, m) for name, m in inner.named_modules() if isinstance(m, _OURS)]
    return Parts(inner, ddp, collections)


def unfit_model(parts: Parts) -> str | None:
    """Why our pipeline cannot train a model; None where it can. The same on every rank."""
    inner, ddp, collections = parts
    inside = [f"{name}." for name, _ in collections]
    for name, module in inner.named_modules():
        if isinstance(module, ShardedModule) and not isinstance(module, _OURS):
            return f"{type(module).__name__} ({name}) is sharded by TorchRec itself"
        is_wrapped = type(module).__name__ in (
            "DistributedDataParallel",
            "FullyShardedDataParallel",
        )
        if is_wrapped and not any(name.startswith(path) for path in inside):
            return f"{name or 'the model'} is a {type(module).__name__}"
    if not collections:
        return "it has no collection that our sharders have sharded"
    if dist.get_world_size(collections[0][1]._env.process_group) < dist.get_world_size():
        return "it is sharded over some of all processes"
    if ddp is not None:
        others = [hook for hook, _ in ddp._comm_hooks if hook is not bf16_compress_hook]
        if others:
            return f"its dense gradients are reduced by {others[0].__name__}"
    for name, parameter in parts.dense_parameters().items():
        hooks = ("_backward_hooks", "_post_accumulate_grad_hooks", "_in_backward_optimizers")
        if any(getattr(parameter, hook, None) for hook in hooks):
            return f"parameter {name} has hooks, or an optimizer, in backward"
    wires = [wire_of(sharded.qcomm_codecs_registry) for _, sharded in collections]
    for (name, sharded), wire in zip(collections, wires, strict=True):
        if isinstance(wire, str):
            return f"{name} has {wire}"
        if wire != wires[0]:
            return f"{name} has other quantized communication than {collections[0][0]}"
        reason = _unfit_collection(sharded)
        if reason is not None:
            return f"{name} {reason}"
    return None


def _unfit_collection(sharded: Any) -> str | None:
    pooled = isinstance(sharded, ShardedEmbeddingBagCollection)
    configs = sharded._embedding_bag_configs if pooled else sharded._embedding_configs
    groups = grouped_configs(shardings_of(sharded))
    if not pooled and sharded._need_indices:
        return "gives indices beside its vectors"
    if pooled and _divides_all(sharded):
        return "has means of row-wise tables beside others, whose vectors TorchRec divides too"
    if any((c.fused_params or {}).get("optimizer") is EmbOptimType.ADAM for c in groups):
        return "has tables under Adam, part of whose update is computed on the host"
    if len(output_dtypes(sharded)) > 1:
        return "gives vectors of several types"
    for plan in plans_of(sharded, configs):
        by_column: dict[int, list[tuple[int, int]]] = {}
        for shard in plan.shards:
            by_column.setdefault(shard.first_column, []).append((shard.rank, shard.first_row))
        if any(places != sorted(set(places)) for places in by_column.values()):
            return f"has the rows of table {plan.table} in another order than its ranks"
    return None


def _divides_all(sharded: Any) -> bool:
    """Whether TorchRec divides vectors by the lengths of bags that need it not."""
    by_row = {ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value}
    types = {
        config.name: sharded.module_sharding_plan[config.name].sharding_type
        for config in sharded._embedding_bag_configs
    }
    has_mean = any(
        config.pooling is PoolingType.MEAN and types[config.name] in by_row
        for config in sharded._embedding_bag_configs
    )
    return has_mean and not by_row.issuperset(types.values())
