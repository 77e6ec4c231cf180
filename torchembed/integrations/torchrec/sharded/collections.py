"""TorchRec's sharded collections with torchembed's lookups in them."""

from typing import cast

from torchrec.distributed.embedding import (
    ShardedEmbeddingCollection as TorchrecShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext
from torchrec.distributed.embeddingbag import (
    ShardedEmbeddingBagCollection as TorchrecShardedEmbeddingBagCollection,
)
from torchrec.distributed.types import Awaitable
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchembed.integrations.torchrec.plans.dynamic_tables import is_dynamic
from torchembed.integrations.torchrec.sharded.collection_base import CollectionBase
from torchembed.integrations.torchrec.sharded.lookups import (
    make_pooled_lookup,
    make_sequence_lookup,
)
from torchembed.integrations.torchrec.versions import Sharding


class ShardedEmbeddingBagCollection(CollectionBase, TorchrecShardedEmbeddingBagCollection):
    """TorchRec's ``ShardedEmbeddingBagCollection`` over torchembed's tables."""

    container = "embedding_bags"

    @property
    def type_shardings(self) -> list[Sharding]:
        return cast("list[Sharding]", self._embedding_shardings)

    @property
    def table_configs(self) -> list[EmbeddingBagConfig]:
        return self._embedding_bag_configs

    @property
    def takes_weights(self) -> bool:
        """True where the weights of ids multiply their vectors."""
        return self._is_weighted

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


class ShardedEmbeddingCollection(CollectionBase, TorchrecShardedEmbeddingCollection):
    """TorchRec's ``ShardedEmbeddingCollection`` over torchembed's tables."""

    container = "embeddings"

    @property
    def type_shardings(self) -> list[Sharding]:
        return cast("list[Sharding]", list(self._sharding_type_to_sharding.values()))

    @property
    def table_configs(self) -> list[EmbeddingConfig]:
        return self._embedding_configs

    @property
    def returns_indices(self) -> bool:
        """True where results hold the ids that their vectors belong to."""
        return self._need_indices

    def _create_lookups(self) -> None:
        self._lookups.extend(map(make_sequence_lookup, self.type_shardings))
