"""Sharders for ``DistributedModelParallel``, and what TorchRec keeps for itself."""

import contextvars
import functools
import itertools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchrec.distributed import sharding_plan
from torchrec.distributed.embedding import (
    EmbeddingCollectionSharder as TorchrecEmbeddingCollectionSharder,
)
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder as TorchrecEmbeddingBagCollectionSharder,
)
from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchembed.integrations.torchrec.settings import unsupported
from torchembed.integrations.torchrec.sharded import (
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
)

_logger = logging.getLogger("torchembed.integrations.torchrec")

within_torchrec = contextvars.ContextVar("within_torchrec", default=False)
"""True while TorchRec shards a module as a whole, the collections in it included."""

# Taken on import, since install() replaces them.
_torchrec_shard_bags = TorchrecEmbeddingBagCollectionSharder.shard
_torchrec_shard_sequences = TorchrecEmbeddingCollectionSharder.shard


def announce_fallback(env: ShardingEnv, module: nn.Module, name: str | None, reason: str) -> None:
    """Say on one rank that TorchRec shards ``module``, and why."""
    if env.rank == 0:
        place = f" ({name})" if name else ""
        _logger.warning(
            "%s%s is sharded by TorchRec itself, since %s", type(module).__name__, place, reason
        )


class EmbeddingBagCollectionSharder(TorchrecEmbeddingBagCollectionSharder):
    """Shards ``EmbeddingBagCollection`` over our tables, with TorchRec's plans and checkpoints.

    Arguments are those of TorchRec's class of that name. A collection that has what we have not is
    sharded by that one, as a whole; a line in the log says so, and why.
    """

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        groups = ShardedEmbeddingBagCollection.create_grouped_sharding_infos(
            module, params, "embedding_bags.", self.fused_params
        )
        reason = unsupported(params, itertools.chain(*groups.values()), env, device)
        if reason is not None:
            announce_fallback(env, module, module_fqn, reason)
            return _torchrec_shard_bags(self, module, params, env, device, module_fqn)
        return ShardedEmbeddingBagCollection(
            module=module,
            table_name_to_parameter_sharding=params,
            env=env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            sharded_module_order_overwrite=self._sharded_module_order_overwrite,
        )

    @property
    def sharded_module_type(self) -> type[ShardedEmbeddingBagCollection]:
        return ShardedEmbeddingBagCollection


class EmbeddingCollectionSharder(TorchrecEmbeddingCollectionSharder):
    """Shards ``EmbeddingCollection``; otherwise as :class:`EmbeddingBagCollectionSharder`."""

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        groups = ShardedEmbeddingCollection.create_grouped_sharding_infos(
            module, params, self.fused_params
        )
        reason = unsupported(params, itertools.chain(*groups.values()), env, device)
        if reason is not None:
            announce_fallback(env, module, module_fqn, reason)
            return _torchrec_shard_sequences(self, module, params, env, device, module_fqn)
        return ShardedEmbeddingCollection(
            module,
            params,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            use_index_dedup=self._use_index_dedup,
            module_fqn=module_fqn,
        )

    @property
    def sharded_module_type(self) -> type[ShardedEmbeddingCollection]:
        return ShardedEmbeddingCollection


def announcing(shard: Callable[..., Any]) -> Callable[..., Any]:
    """``shard`` of another sharder of TorchRec's, bound, which says that it was used, once for a
    module and all that is in it."""

    @functools.wraps(shard)
    def announced(
        module: nn.Module,
        params: Any,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        if within_torchrec.get():
            return shard(module, params, env, device, module_fqn)
        reason = "only EmbeddingBagCollection and EmbeddingCollection are ours"
        announce_fallback(env, module, module_fqn, reason)
        token = within_torchrec.set(True)
        try:
            return shard(module, params, env, device, module_fqn)
        finally:
            within_torchrec.reset(token)

    return announced


def get_default_sharders() -> list[ModuleSharder[nn.Module]]:
    """TorchRec's default sharders, ours in the place of two of them."""
    ours: dict[Any, Any] = {
        EmbeddingBagCollection: EmbeddingBagCollectionSharder(),
        EmbeddingCollection: EmbeddingCollectionSharder(),
    }
    sharders = []
    for sharder in sharding_plan.get_default_sharders():
        if sharder.module_type not in ours:
            sharder.shard = announcing(sharder.shard)  # type: ignore[method-assign]
        sharders.append(ours.get(sharder.module_type, sharder))
    return sharders
