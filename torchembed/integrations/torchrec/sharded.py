"""TorchRec's sharded collections with our lookups in them."""

from typing import Any

from torchrec.distributed.embedding import (
    ShardedEmbeddingCollection as TorchrecShardedEmbeddingCollection,
)
from torchrec.distributed.embeddingbag import (
    ShardedEmbeddingBagCollection as TorchrecShardedEmbeddingBagCollection,
)

from torchembed.integrations.torchrec.lookups import pooled_lookup_of, sequence_lookup_of


def _refuse_variable_batches(features: Any) -> None:
    if getattr(features, "variable_stride_per_key", bool)():
        raise NotImplementedError(
            "features must have one batch size for all keys (no variable batch per feature); shard "
            "this module by TorchRec's own sharder to use several"
        )


class ShardedEmbeddingBagCollection(TorchrecShardedEmbeddingBagCollection):
    """TorchRec's, over our tables."""

    def _create_lookups(self) -> None:
        self._lookups.extend(map(pooled_lookup_of, self._embedding_shardings))

    def input_dist(self, ctx: Any, features: Any) -> Any:
        _refuse_variable_batches(features)
        return super().input_dist(ctx, features)


class ShardedEmbeddingCollection(TorchrecShardedEmbeddingCollection):
    """TorchRec's, over our tables."""

    def _create_lookups(self) -> None:
        self._lookups.extend(map(sequence_lookup_of, self._sharding_type_to_sharding.values()))

    def input_dist(self, ctx: Any, features: Any) -> Any:
        _refuse_variable_batches(features)
        return super().input_dist(ctx, features)
