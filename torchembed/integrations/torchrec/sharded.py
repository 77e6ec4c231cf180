"""TorchRec's sharded collections with torchembed's lookups in them."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import (
    ShardedEmbeddingCollection as TorchrecShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext
from torchrec.distributed.embeddingbag import (
    ShardedEmbeddingBagCollection as TorchrecShardedEmbeddingBagCollection,
)
from torchrec.distributed.types import Awaitable, ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchembed.integrations.torchrec.description import DescribedCollection
from torchembed.integrations.torchrec.dynamic_tables import is_dynamic, note_settings
from torchembed.integrations.torchrec.hashed_ids import with_hashed_ids
from torchembed.integrations.torchrec.index_state import keep_in_state
from torchembed.integrations.torchrec.lookups import (
    PooledLookup,
    SequenceLookup,
    make_pooled_lookup,
    make_sequence_lookup,
)
from torchembed.integrations.torchrec.versions import Sharding


def _without_ddp(lookups: Iterable[nn.Module]) -> list[nn.Module]:
    return [ddp.module if isinstance(ddp, DistributedDataParallel) else ddp for ddp in lookups]


class ShardedEmbeddingBagCollection(DescribedCollection, TorchrecShardedEmbeddingBagCollection):
    """TorchRec's ``ShardedEmbeddingBagCollection`` over torchembed's tables."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        keep_in_state(self, self.indexed_tables("embedding_bags"))

    @classmethod
    def create_grouped_sharding_infos(
        cls, module: Any, *arguments: Any, **settings: Any
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        infos = super().create_grouped_sharding_infos(module, *arguments, **settings)
        note_settings(itertools.chain(*infos.values()), module)
        return infos

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.reset_dynamic_tables()

    def _create_input_dist(self, *arguments: Any, **settings: Any) -> None:
        super()._create_input_dist(*arguments, **settings)
        self._input_dists = with_hashed_ids(self._input_dists, self.type_shardings)

    @property
    def sharding_env(self) -> ShardingEnv:
        return self._env

    @property
    def type_shardings(self) -> list[Sharding]:
        return cast("list[Sharding]", self._embedding_shardings)

    @property
    def lookups(self) -> Sequence[PooledLookup]:
        return cast("list[PooledLookup]", _without_ddp(self._lookups))

    @property
    def table_configs(self) -> list[EmbeddingBagConfig]:
        return self._embedding_bag_configs

    @property
    def table_shardings(self) -> dict[str, ParameterSharding]:
        return self.module_sharding_plan

    @property
    def takes_weights(self) -> bool:
        """True where the weights of ids multiply their vectors."""
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        """The device of this rank's tables."""
        return torch.device(self._device or "cpu")

    def _create_lookups(self) -> None:
        self._lookups.extend(map(make_pooled_lookup, self.type_shardings))

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Exchange ``features`` as TorchRec does, but for ids of dynamic tables.

        Raises:
            NotImplementedError: where keys have batch sizes of their own, which the lookups do not
                take. No rank has been sent anything then.
        """
        # Some versions take a TensorDict, too.
        if isinstance(features, KeyedJaggedTensor) and features.variable_stride_per_key():
            raise NotImplementedError(
                "features must have one batch size for all keys (no variable batch per feature); "
                "shard this module by TorchRec's own sharder to use several"
            )
        if not self._has_uninitialized_input_dist:
            return super().input_dist(ctx, features)
        # TorchRec compares the ids of the first batch with these configs, and warns.
        configs = self._embedding_bag_configs
        self._embedding_bag_configs = [c for c in configs if not is_dynamic(c)]
        try:
            return super().input_dist(ctx, features)
        finally:
            self._embedding_bag_configs = configs


class ShardedEmbeddingCollection(DescribedCollection, TorchrecShardedEmbeddingCollection):
    """TorchRec's ``ShardedEmbeddingCollection`` over torchembed's tables."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        keep_in_state(self, self.indexed_tables("embeddings"))

    @classmethod
    def create_grouped_sharding_infos(
        cls, module: Any, *arguments: Any, **settings: Any
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        infos = super().create_grouped_sharding_infos(module, *arguments, **settings)
        note_settings(itertools.chain(*infos.values()), module)
        return infos

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.reset_dynamic_tables()

    def _create_input_dist(self, *arguments: Any, **settings: Any) -> None:
        super()._create_input_dist(*arguments, **settings)
        self._input_dists = with_hashed_ids(self._input_dists, self.type_shardings)

    @property
    def sharding_env(self) -> ShardingEnv:
        return self._env

    @property
    def type_shardings(self) -> list[Sharding]:
        return cast("list[Sharding]", list(self._sharding_type_to_sharding.values()))

    @property
    def lookups(self) -> Sequence[SequenceLookup]:
        return cast("list[SequenceLookup]", _without_ddp(self._lookups))

    @property
    def table_configs(self) -> list[EmbeddingConfig]:
        return self._embedding_configs

    @property
    def table_shardings(self) -> dict[str, ParameterSharding]:
        return self.module_sharding_plan

    @property
    def returns_indices(self) -> bool:
        """True where results hold the ids that their vectors belong to."""
        return self._need_indices

    @property
    def device(self) -> torch.device:
        """The device of this rank's tables."""
        return torch.device(self._device or "cpu")

    def _create_lookups(self) -> None:
        self._lookups.extend(map(make_sequence_lookup, self.type_shardings))
