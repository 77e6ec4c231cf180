"""A TorchRec model without its wrappers, and why torchembed's pipeline may not support it."""

from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardedModule, ShardingType
from torchrec.modules.embedding_configs import PoolingType

from torchembed.integrations.torchrec.sharded.collections import (
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
)
from torchembed.integrations.torchrec.trained_model.wire_precision import wire_precision
from torchembed.integrations.torchrec.versions import grouped_configs
from torchembed.sharding.wire import WirePrecision

_COLLECTIONS = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)

Collection: TypeAlias = ShardedEmbeddingBagCollection | ShardedEmbeddingCollection
"""A TorchRec collection over torchembed's tables."""


class UnwrappedModel(NamedTuple):
    """A model for training, taken out of ``DistributedModelParallel`` and DDP."""

    inner: nn.Module
    """The user's module."""
    ddp: DistributedDataParallel | None
    """The DDP module that wrapped it; None where none did."""
    collections: list[tuple[str, Collection]]
    """Names and modules of the collections over torchembed's tables."""
    wrappers: list[nn.Module]
    """The modules that it was taken out of, which steps do not call."""

    @property
    def wire(self) -> WirePrecision:
        """The precision in which its vectors and gradients are exchanged."""
        wire = wire_precision(self.collections[0][1].qcomm_codecs_registry)
        assert not isinstance(wire, str)
        hooks = [] if self.ddp is None else self.ddp._comm_hooks
        dense = torch.bfloat16 if hooks else None
        return WirePrecision(forward=wire.forward, backward=wire.backward, dense=dense)

    def dense_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that are in no collection, under all of their names."""
        inside = tuple(f"{name}." for name, _ in self.collections)
        named = self.inner.named_parameters(remove_duplicate=False)
        return {name: p for name, p in named if not name.startswith(inside)}

    def averaged_parameters(self) -> list[nn.Parameter]:
        """The dense parameters whose gradients DDP would average."""
        if self.ddp is None:
            return []
        left_out = self.ddp.parameters_to_ignore
        return [p for name, p in self.dense_parameters().items() if name not in left_out]


def unwrap(model: nn.Module) -> UnwrappedModel:
    """Take ``model`` out of its wrappers, and find its collections over torchembed's tables."""
    inner, ddp, wrappers = model, None, list[nn.Module]()
    if isinstance(inner, DistributedModelParallel):
        wrappers.append(inner)
        inner = inner._dmp_wrapped_module
    if isinstance(inner, DistributedDataParallel):
        wrappers.append(inner)
        ddp, inner = inner, inner.module
    collections = [(name, m) for name, m in inner.named_modules() if isinstance(m, _COLLECTIONS)]
    return UnwrappedModel(inner, ddp, collections, wrappers)


def unsupported_model(model: UnwrappedModel) -> str | None:
    """Reason why torchembed's pipeline cannot train ``model``, the same on every rank; None where
    it can."""
    inner, ddp, collections, _ = model
    inside = [f"{name}." for name, _ in collections]
    for name, module in inner.named_modules():
        if isinstance(module, ShardedModule) and not isinstance(module, _COLLECTIONS):
            return f"{type(module).__name__} ({name}) is sharded by TorchRec itself"
        is_wrapped = type(module).__name__ in (
            "DistributedDataParallel",
            "FullyShardedDataParallel",
        )
        if is_wrapped and not any(name.startswith(path) for path in inside):
            return f"{name or 'the model'} is a {type(module).__name__}"
    if not collections:
        return "torchembed's sharders have sharded none of its collections"
    if dist.get_world_size(collections[0][1].process_group) < dist.get_world_size():
        return "it is sharded over some of all processes"
    if ddp is not None:
        others = [hook for hook, _ in ddp._comm_hooks if hook is not bf16_compress_hook]
        if others:
            return f"its dense gradients are reduced by {others[0].__name__}"
    reason = unsupported_hooks(model)
    if reason is not None:
        return reason
    wires = [wire_precision(sharded.qcomm_codecs_registry) for _, sharded in collections]
    for (name, sharded), wire in zip(collections, wires, strict=True):
        if isinstance(wire, str):
            return f"{name} has {wire}"
        if wire != wires[0]:
            return f"{name} has other quantized communication than {collections[0][0]}"
        reason = _unsupported_collection(sharded)
        if reason is not None:
            return f"{name} {reason}"
    return None


def unsupported_hooks(model: UnwrappedModel) -> str | None:
    """A hook that torchembed's pipeline would not call, as it takes parameters' aliases and no
    wrapper; None where there is none. Hooks may be registered between steps."""
    of_modules = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    for wrapper in model.wrappers:
        if any(getattr(wrapper, hooks) for hooks in of_modules):
            return f"its {type(wrapper).__name__} has hooks"
    for name, parameter in model.dense_parameters().items():
        hooks = ("_backward_hooks", "_post_accumulate_grad_hooks", "_in_backward_optimizers")
        if any(getattr(parameter, hook, None) for hook in hooks):
            return f"parameter {name} has hooks, or an optimizer, in backward"
    return None


def _unsupported_collection(sharded: Collection) -> str | None:
    """Reason why torchembed's pipeline cannot train ``sharded``; None where it can."""
    if isinstance(sharded, ShardedEmbeddingBagCollection):
        if _divides_all(sharded):
            return "has means of row-wise tables among others, whose vectors TorchRec divides too"
    elif sharded.returns_indices:
        return "gives indices in addition to its vectors"
    configs = grouped_configs(sharded.type_shardings)
    if any((c.fused_params or {}).get("optimizer") is EmbOptimType.ADAM for c in configs):
        return "has tables under Adam, part of whose update is computed on the host"
    if len(sharded.output_dtypes) > 1:
        return "gives vectors of several types"
    for plan in sharded.table_plans:
        by_column: dict[int, list[tuple[int, int]]] = {}
        for shard in plan.shards:
            by_column.setdefault(shard.first_column, []).append((shard.rank, shard.first_row))
        if any(places != sorted(set(places)) for places in by_column.values()):
            return f"has the rows of table {plan.table} in another order than its ranks"
    return None


def _divides_all(sharded: ShardedEmbeddingBagCollection) -> bool:
    """True where TorchRec divides vectors of other shardings by the lengths of bags as well, as it
    does where a row-wise table has mean pooling."""
    by_row = {ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value}
    types = {
        config.name: sharded.table_shardings[config.name].sharding_type
        for config in sharded.table_configs
    }
    has_mean = any(
        config.pooling is PoolingType.MEAN and types[config.name] in by_row
        for config in sharded.table_configs
    )
    return has_mean and not by_row.issuperset(types.values())
