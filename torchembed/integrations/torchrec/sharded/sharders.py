"""Sharders for ``DistributedModelParallel``, and the fallback to TorchRec's own."""

import contextvars
import functools
import itertools
import logging
from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch
from torch import nn
from torchrec.distributed import sharding_plan
from torchrec.distributed.embedding import (
    EmbeddingCollectionSharder as TorchrecEmbeddingCollectionSharder,
)
from torchrec.distributed.embedding import (
    ShardedEmbeddingCollection as TorchrecShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder as TorchrecEmbeddingBagCollectionSharder,
)
from torchrec.distributed.embeddingbag import (
    ShardedEmbeddingBagCollection as TorchrecShardedEmbeddingBagCollection,
)
from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchembed.integrations.torchrec.plans.disk import without_effect
from torchembed.integrations.torchrec.plans.dynamic_tables import dynamic_configs, with_rounded_rows
from torchembed.integrations.torchrec.plans.given_storages import (
    check_given_storages,
    given_storages,
)
from torchembed.integrations.torchrec.plans.settings import unsupported_collection
from torchembed.integrations.torchrec.sharded.collections import (
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
)

Shard: TypeAlias = Callable[..., nn.Module]
"""``ModuleSharder.shard`` of any sharder."""

_logger = logging.getLogger("torchembed.integrations.torchrec")

within_torchrec = contextvars.ContextVar("within_torchrec", default=False)
"""True while a sharder of TorchRec's own shards a module and the collections within it."""

# Read on import, since install() replaces the attributes.
_torchrec_shard_bags = TorchrecEmbeddingBagCollectionSharder.shard
_torchrec_shard_sequences = TorchrecEmbeddingCollectionSharder.shard


def warn_of_fallback(env: ShardingEnv, module: nn.Module, name: str | None, reason: str) -> None:
    """Log on rank 0 that TorchRec shards ``module``, and the ``reason``.

    Raises:
        ValueError: for a module with dynamic tables, or tables whose config has a storage, which
            TorchRec has not.
    """
    own = [
        f"{kind} {', '.join(names)}"
        for kind, names_of in (
            ("dynamic tables", dynamic_configs),
            ("tables with a storage", given_storages),
        )
        if (names := [name for child in module.modules() for name in names_of(child)])
    ]
    if own:
        raise ValueError(
            f"{' and '.join(own)} must be sharded by torchembed, which cannot shard their "
            f"{type(module).__name__}, since {reason}; change that, or put the tables into a "
            "collection of their own"
        )
    if env.rank == 0:
        place = _described(module, name)
        _logger.warning("%s is sharded by TorchRec itself, since %s", place, reason)


def warn_of_settings(
    env: ShardingEnv, module: nn.Module, name: str | None, infos: Iterable[EmbeddingShardingInfo]
) -> None:
    """Log on rank 0 which settings of tables on disk in ``module`` change nothing."""
    found = without_effect(infos, module)
    if found and env.rank == 0:
        settings = [f"{setting} (of {', '.join(sorted(of))})" for setting, of in found.items()]
        text = "%s has tables on disk, of which these settings change nothing: %s"
        _logger.warning(text, _described(module, name), ", ".join(settings))


def _described(module: nn.Module, name: str | None) -> str:
    return f"{type(module).__name__} ({name})" if name else type(module).__name__


class EmbeddingBagCollectionSharder(TorchrecEmbeddingBagCollectionSharder):
    """Shards ``EmbeddingBagCollection`` over torchembed's tables, with TorchRec's plans and
    checkpoints.

    Arguments are those of TorchRec's class of that name, which shards whole collections that
    torchembed does not support; the log then says so and why.
    """

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> TorchrecShardedEmbeddingBagCollection:
        module, params = with_rounded_rows(module, params)
        check_given_storages(module, params)
        groups = ShardedEmbeddingBagCollection.create_grouped_sharding_infos(
            module, params, "embedding_bags.", self.fused_params
        )
        reason = unsupported_collection(params, itertools.chain(*groups.values()), env, device)
        if reason is not None:
            warn_of_fallback(env, module, module_fqn, reason)
            return _torchrec_shard_bags(self, module, params, env, device, module_fqn)
        warn_of_settings(env, module, module_fqn, itertools.chain(*groups.values()))
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
    """Shards ``EmbeddingCollection`` as :class:`EmbeddingBagCollectionSharder` shards bags."""

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> TorchrecShardedEmbeddingCollection:
        module, params = with_rounded_rows(module, params)
        check_given_storages(module, params)
        groups = ShardedEmbeddingCollection.create_grouped_sharding_infos(
            module, params, self.fused_params
        )
        reason = unsupported_collection(params, itertools.chain(*groups.values()), env, device)
        if reason is None and self._use_index_dedup and dynamic_configs(module):
            reason = "use_index_dedup is set"
        if reason is not None:
            warn_of_fallback(env, module, module_fqn, reason)
            return _torchrec_shard_sequences(self, module, params, env, device, module_fqn)
        warn_of_settings(env, module, module_fqn, itertools.chain(*groups.values()))
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


def with_fallback_warning(shard: Shard) -> Shard:
    """Wrap the bound ``shard`` of one of TorchRec's other sharders: it logs, once for a module and
    the modules within, that TorchRec shards it."""

    @functools.wraps(shard)
    def wrapped(
        module: nn.Module,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> nn.Module:
        if within_torchrec.get():
            return shard(module, params, env, device, module_fqn)
        reason = "torchembed shards EmbeddingBagCollection and EmbeddingCollection only"
        warn_of_fallback(env, module, module_fqn, reason)
        token = within_torchrec.set(True)
        try:
            return shard(module, params, env, device, module_fqn)
        finally:
            within_torchrec.reset(token)

    return wrapped


def get_default_sharders() -> list[ModuleSharder[nn.Module]]:
    """TorchRec's default sharders, with torchembed's in place of the two that it has."""
    ours: dict[type[nn.Module], ModuleSharder] = {
        EmbeddingBagCollection: EmbeddingBagCollectionSharder(),
        EmbeddingCollection: EmbeddingCollectionSharder(),
    }
    sharders = []
    for sharder in sharding_plan.get_default_sharders():
        if sharder.module_type not in ours:
            sharder.shard = with_fallback_warning(sharder.shard)  # type: ignore[method-assign]
        sharders.append(ours.get(sharder.module_type, sharder))
    return sharders
