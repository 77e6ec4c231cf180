"""TorchRec's lookups with torchembed's kernels in them."""

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingSharding
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchembed.integrations.torchrec.sharded.kernels import (
    DenseBags,
    DenseSequences,
    FusedBags,
    FusedSequences,
)
from torchembed.integrations.torchrec.versions import Sharding, lookup_arguments

_SHARDING_TYPES = {
    RwPooledEmbeddingSharding: ShardingType.ROW_WISE,
    TwRwPooledEmbeddingSharding: ShardingType.TABLE_ROW_WISE,
}
"""Shardings whose ranks hold parts of a bag, so that a mean is taken after the exchange."""


class PooledLookup(GroupedPooledEmbeddingsLookup):
    """Pooled vectors of this rank's tables of one sharding."""

    @property
    def kernels(self) -> list[FusedBags | DenseBags]:
        """The kernel of each group of tables."""
        return cast("list[FusedBags | DenseBags]", list(self._emb_modules))

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        pg: dist.ProcessGroup | None,
        sharding_type: ShardingType | None,
        env: ShardingEnv | None,
    ) -> BaseEmbedding:
        if config.compute_kernel is EmbeddingComputeKernel.DENSE:
            return DenseBags(config, pg, device, sharding_type)
        return FusedBags(config, pg, device, sharding_type)

    def forward(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        # Splitting the features between kernels, TorchRec's forward reads their lengths.
        kernels = self._emb_modules
        is_plain = self.optim_state_tracker_fn is None and len(kernels) == 1
        if is_plain and not self.grouped_configs[0].is_weighted:
            (kernel,) = kernels
            return kernel(sparse_features)
        return super().forward(sparse_features)


class SequenceLookup(GroupedEmbeddingsLookup):
    """A vector for each id, from this rank's tables of one sharding."""

    @property
    def kernels(self) -> list[FusedSequences | DenseSequences]:
        """The kernel of each group of tables."""
        return cast("list[FusedSequences | DenseSequences]", list(self._emb_modules))

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
        env: ShardingEnv | None = None,
    ) -> BaseEmbedding:
        is_dense = config.compute_kernel is EmbeddingComputeKernel.DENSE
        return (DenseSequences if is_dense else FusedSequences)(config, pg, device)


def make_pooled_lookup(sharding: Sharding) -> PooledLookup:
    """Make the lookup that replaces ``sharding.create_lookup()``'s."""
    return PooledLookup(
        **lookup_arguments(sharding)._asdict(),
        # The mean over ranks of data-parallel tables is DDP's, not the exchange's.
        scale_weight_gradients=not isinstance(sharding, DpPooledEmbeddingSharding),
        sharding_type=_SHARDING_TYPES.get(type(sharding)),
    )


def make_sequence_lookup(sharding: Sharding) -> SequenceLookup:
    """Make the lookup that replaces ``sharding.create_lookup()``'s."""
    return SequenceLookup(**lookup_arguments(sharding)._asdict())
