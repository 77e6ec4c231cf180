"""TorchRec's sharded collections with torchembed's lookups and exchanges in them."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.comm_ops import get_use_sync_collectives
from torchrec.distributed.embedding import (
    EmbeddingCollectionContext,
)
from torchrec.distributed.embedding import (
    ShardedEmbeddingCollection as TorchrecShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_sharding import (
    EmbeddingShardingContext,
    KJTListSplitsAwaitable,
)
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionAwaitable,
    EmbeddingBagCollectionContext,
)
from torchrec.distributed.embeddingbag import (
    ShardedEmbeddingBagCollection as TorchrecShardedEmbeddingBagCollection,
)
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.sharding.tw_sharding import (
    BaseTwEmbeddingSharding,
    TwSparseFeaturesDist,
)
from torchrec.distributed.types import Awaitable, LazyAwaitable, ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchembed.integrations.torchrec.combined_features_dist import (
    CombinedFeaturesDist,
    make_combined_features_dist,
)
from torchembed.integrations.torchrec.combined_lookup import CombinedLookup, can_combine
from torchembed.integrations.torchrec.description import DescribedCollection
from torchembed.integrations.torchrec.features_dist import FeaturesDist, RowFeaturesDist, permuted
from torchembed.integrations.torchrec.lookups import (
    PooledLookup,
    SequenceLookup,
    make_pooled_lookup,
    make_sequence_lookup,
)
from torchembed.integrations.torchrec.outputs_dist import OutputsDist, make_outputs_dist
from torchembed.integrations.torchrec.versions import (
    Sharding,
    frees_features_early,
    is_tracked,
    process_group,
)


def _check_batch_size(features: KeyedJaggedTensor) -> None:
    """
    Raises:
        NotImplementedError: where keys have batch sizes of their own.
    """
    if getattr(features, "variable_stride_per_key", bool)():
        raise NotImplementedError(
            "features must have one batch size for all keys (no variable batch per feature); shard "
            "this module by TorchRec's own sharder to use several"
        )


def _without_ddp(lookups: Iterable[nn.Module]) -> list[nn.Module]:
    return [ddp.module if isinstance(ddp, DistributedDataParallel) else ddp for ddp in lookups]


def _replace_table_wise(shardings: Iterable[Sharding], input_dists: list[nn.Module]) -> None:
    """Replace TorchRec's distributions of whole features by :class:`FeaturesDist`, in place."""
    for number, sharding in enumerate(shardings):
        if type(input_dists[number]) is TwSparseFeaturesDist:
            assert isinstance(sharding, BaseTwEmbeddingSharding)
            pg, counts = process_group(sharding), sharding.features_per_rank()
            input_dists[number] = FeaturesDist(pg, counts)


class ShardedEmbeddingBagCollection(DescribedCollection, TorchrecShardedEmbeddingBagCollection):
    """TorchRec's ``ShardedEmbeddingBagCollection`` over torchembed's tables."""

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
        self._combined: CombinedLookup | None = None
        if can_combine(self.type_shardings):
            self._combined = CombinedLookup(self.type_shardings)
            self._lookups.extend(self._combined.lookups)
        else:
            self._lookups.extend(map(make_pooled_lookup, self.type_shardings))

    def _create_input_dist(self, input_feature_names: list[str]) -> None:
        super()._create_input_dist(input_feature_names)
        self._combined_dist: CombinedFeaturesDist | None = None
        if self._combined is not None and self._outputs_dist is not None:
            self._combined_dist = make_combined_features_dist(
                self.type_shardings, input_feature_names, self._combined.device
            )
        shardings = self.type_shardings
        _replace_table_wise(shardings, self._input_dists)
        for number, (sharding, theirs) in enumerate(zip(shardings, self._input_dists, strict=True)):
            if type(theirs) is RwSparseFeaturesDist:
                self._input_dists[number] = RowFeaturesDist(process_group(sharding), theirs)

    def _create_output_dist(self) -> None:
        super()._create_output_dist()
        self._replace_output_dists()

    def _update_output_dist(self) -> None:
        super()._update_output_dist()
        self._replace_output_dists()

    def _replace_output_dists(self) -> None:
        self._outputs_dist: OutputsDist | None = None
        if not self._has_mean_pooling_callback:
            self._outputs_dist = make_outputs_dist(self.type_shardings, self._output_dists)

    def compute_and_output_dist(
        self,
        ctx: EmbeddingBagCollectionContext,
        input: KJTList,  # noqa: A002 - TorchRec's name
    ) -> LazyAwaitable[KeyedTensor]:
        if self._outputs_dist is None or not self._is_plain():
            return super().compute_and_output_dist(ctx, self._per_lookup(input))
        if self._combined is not None and len(input) == 1 and self._combined.is_uniform():
            vectors = [self._combined(input[0])]
        else:
            vectors = [
                lookup(features)
                for lookup, features in zip(self._lookups, self._per_lookup(input), strict=True)
            ]
        context = ctx.sharding_contexts[0]
        assert context is not None  # None for tables that this module does not shard
        batch_sizes = context.batch_size_per_rank
        return EmbeddingBagCollectionAwaitable(
            awaitables=[self._outputs_dist(vectors, batch_sizes)],
            embedding_dims=self._embedding_dims,
            embedding_names=self._embedding_names,
        )

    def _per_lookup(self, received: KJTList) -> KJTList:
        """The features of each lookup, which may have been received as one."""
        if len(received) == len(self._lookups):
            return received
        counts = [sum(lookup._feature_splits) for lookup in self.lookups]
        return KJTList(received[0].split(counts))

    def _is_plain(self) -> bool:
        """True where neither a tracker watches lookups nor a compiler traces collectives."""
        return not get_use_sync_collectives() and not is_tracked(self)

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        _check_batch_size(features)
        if self._has_uninitialized_input_dist or not self._is_sent_at_once(features):
            return super().input_dist(ctx, features)
        ctx.variable_batch_per_feature = False
        ctx.inverse_indices = None
        context = EmbeddingShardingContext(batch_size_per_feature_pre_a2a=features.stride_per_key())
        # One context serves all shardings, since their batches are the same.
        ctx.sharding_contexts.extend([context] * len(self._lookups))
        with torch.no_grad():
            splits = self._exchange_splits(features)
        return KJTListSplitsAwaitable([splits], ctx, self._module_fqn, self._sharding_types)

    def _exchange_splits(
        self, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        if self._combined_dist is not None:
            return self._combined_dist(features)
        if self._has_features_permute:
            order = cast("Tensor", self._features_order_tensor)
            features = permuted(features, self._features_order, order)
        (features_dist,) = self._input_dists
        return features_dist(features)

    def _is_sent_at_once(self, features: object) -> bool:
        """True where one of torchembed's exchanges takes all of the features, each once.

        Otherwise TorchRec splits them between several exchanges, for which it reads their lengths.
        """
        if not isinstance(features, KeyedJaggedTensor) or frees_features_early(self):
            return False
        if self._combined_dist is not None:
            return True
        order = self._features_order
        return (
            len(self._input_dists) == 1
            and isinstance(self._input_dists[0], (FeaturesDist, RowFeaturesDist))
            and not self._has_mean_pooling_callback
            and (not self._has_features_permute or sorted(order) == list(range(len(order))))
            and (not self._has_features_permute or len(order) == len(features.keys()))
        )


class ShardedEmbeddingCollection(DescribedCollection, TorchrecShardedEmbeddingCollection):
    """TorchRec's ``ShardedEmbeddingCollection`` over torchembed's tables."""

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

    def _create_input_dist(self, input_feature_names: list[str], **context: Any) -> None:
        # Some versions pass their context too.
        super()._create_input_dist(input_feature_names, **context)
        # Row-wise distributions stay TorchRec's: it looks for their class to restore the order.
        _replace_table_wise(self.type_shardings, self._input_dists)

    def input_dist(
        self, ctx: EmbeddingCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        _check_batch_size(features)
        return super().input_dist(ctx, features)
