"""TorchRec's sharded collections with our lookups in them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torchrec.distributed.comm_ops import get_use_sync_collectives
from torchrec.distributed.embedding import (
    ShardedEmbeddingCollection as TorchrecShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_sharding import (
    EmbeddingShardingContext,
    KJTListSplitsAwaitable,
)
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionAwaitable
from torchrec.distributed.embeddingbag import (
    ShardedEmbeddingBagCollection as TorchrecShardedEmbeddingBagCollection,
)
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.sharding.tw_sharding import TwSparseFeaturesDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchembed.integrations.torchrec.features_dist import FeaturesDist, RowFeaturesDist, permuted
from torchembed.integrations.torchrec.lookups import pooled_lookup_of, sequence_lookup_of
from torchembed.integrations.torchrec.outputs_dist import OutputsDist, outputs_dist_of
from torchembed.integrations.torchrec.united_features_dist import (
    UnitedFeaturesDist,
    united_features_dist_of,
)
from torchembed.integrations.torchrec.united_lookup import UnitedLookup, may_unite
from torchembed.integrations.torchrec.versions import frees_features_early, is_tracked


def _refuse_variable_batches(features: Any) -> None:
    if getattr(features, "variable_stride_per_key", bool)():
        raise NotImplementedError(
            "features must have one batch size for all keys (no variable batch per feature); shard "
            "this module by TorchRec's own sharder to use several"
        )


def _replace_whole(shardings: Iterable[Any], input_dists: list[nn.Module]) -> None:
    """Put our exchange of whole features in the place of TorchRec's."""
    for number, sharding in enumerate(shardings):
        if type(input_dists[number]) is TwSparseFeaturesDist:
            input_dists[number] = FeaturesDist(sharding._pg, sharding.features_per_rank())


class ShardedEmbeddingBagCollection(TorchrecShardedEmbeddingBagCollection):
    """TorchRec's, over our tables."""

    def _create_lookups(self) -> None:
        self._united: UnitedLookup | None = None
        if may_unite(self._embedding_shardings):
            self._united = UnitedLookup(self._embedding_shardings)
            self._lookups.extend(self._united.lookups)
        else:
            self._lookups.extend(map(pooled_lookup_of, self._embedding_shardings))

    def _create_input_dist(self, input_feature_names: list[str]) -> None:
        super()._create_input_dist(input_feature_names)
        self._united_dist: UnitedFeaturesDist | None = None
        if self._united is not None and self._outputs_dist is not None:
            self._united_dist = united_features_dist_of(
                self._embedding_shardings, input_feature_names, self._united.device
            )
        _replace_whole(self._embedding_shardings, self._input_dists)
        shardings: list[Any] = self._embedding_shardings
        for number, (sharding, theirs) in enumerate(zip(shardings, self._input_dists, strict=True)):
            if type(theirs) is RwSparseFeaturesDist:
                self._input_dists[number] = RowFeaturesDist(sharding._pg, theirs)

    def _create_output_dist(self) -> None:
        super()._create_output_dist()
        self._replace_output_dists()

    def _update_output_dist(self) -> None:
        super()._update_output_dist()
        self._replace_output_dists()

    def _replace_output_dists(self) -> None:
        self._outputs_dist: OutputsDist | None = None
        if not self._has_mean_pooling_callback:
            self._outputs_dist = outputs_dist_of(self._embedding_shardings, self._output_dists)

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:  # noqa: A002
        if self._outputs_dist is None or not self._is_plain():
            return super().compute_and_output_dist(ctx, self._divided(input))
        if self._united is not None and len(input) == 1 and self._united.is_one():
            vectors = [self._united(input[0])]
        else:
            parts = zip(self._lookups, self._divided(input), strict=True)
            vectors = [lookup(part) for lookup, part in parts]
        batch_sizes = ctx.sharding_contexts[0].batch_size_per_rank
        return EmbeddingBagCollectionAwaitable(
            awaitables=[self._outputs_dist(vectors, batch_sizes)],
            embedding_dims=self._embedding_dims,
            embedding_names=self._embedding_names,
        )

    def _divided(self, parts: KJTList) -> KJTList:
        """The features of each lookup, which may have been sent together."""
        if len(parts) == len(self._lookups):
            return parts
        lookups: list[Any] = self._lookups
        counts = [sum(lookup._feature_splits) for lookup in lookups]
        return KJTList(parts[0].split(counts))

    def _is_plain(self) -> bool:
        """Whether no tracker of a user's looks on, and no compiler."""
        return not get_use_sync_collectives() and not is_tracked(self)

    def input_dist(self, ctx: Any, features: Any) -> Any:
        _refuse_variable_batches(features)
        if self._has_uninitialized_input_dist or not self._is_sent_at_once(features):
            return super().input_dist(ctx, features)
        ctx.variable_batch_per_feature = False
        ctx.inverse_indices = None
        context = EmbeddingShardingContext(batch_size_per_feature_pre_a2a=features.stride_per_key())
        # Of all placements, whose batches are the same.
        ctx.sharding_contexts.extend([context] * len(self._lookups))
        with torch.no_grad():
            sizes = self._send(features)
        return KJTListSplitsAwaitable([sizes], ctx, self._module_fqn, self._sharding_types)

    def _send(self, features: KeyedJaggedTensor) -> Any:
        if self._united_dist is not None:
            return self._united_dist(features)
        if self._has_features_permute:
            features = permuted(features, self._features_order, self._features_order_tensor)
        (features_dist,) = self._input_dists
        return features_dist(features)

    def _is_sent_at_once(self, features: Any) -> bool:
        """Whether all of the features go through one of our exchanges, each once.

        Otherwise TorchRec divides them between several, for which it reads their lengths.
        """
        if not isinstance(features, KeyedJaggedTensor) or frees_features_early(self):
            return False
        if self._united_dist is not None:
            return True
        order = self._features_order
        return (
            len(self._input_dists) == 1
            and isinstance(self._input_dists[0], (FeaturesDist, RowFeaturesDist))
            and not self._has_mean_pooling_callback
            and (not self._has_features_permute or sorted(order) == list(range(len(order))))
            and (not self._has_features_permute or len(order) == len(features.keys()))
        )


class ShardedEmbeddingCollection(TorchrecShardedEmbeddingCollection):
    """TorchRec's, over our tables."""

    def _create_lookups(self) -> None:
        self._lookups.extend(map(sequence_lookup_of, self._sharding_type_to_sharding.values()))

    def _create_input_dist(self, *arguments: Any, **named: Any) -> None:
        super()._create_input_dist(*arguments, **named)
        # Row-wise ones stay TorchRec's, which looks for its class to put vectors back in order.
        _replace_whole(self._sharding_type_to_sharding.values(), self._input_dists)

    def input_dist(self, ctx: Any, features: Any) -> Any:
        _refuse_variable_batches(features)
        return super().input_dist(ctx, features)
