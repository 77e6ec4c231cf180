"""TorchRec's lookups with our kernels in them."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec.distributed.embedding_sharding import EmbeddingSharding
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingSharding
from torchrec.distributed.types import ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchembed.integrations.torchrec.kernels import (
    DenseBags,
    DenseSequences,
    FusedBags,
    FusedSequences,
)
from torchembed.integrations.torchrec.shared_rows import Rows
from torchembed.integrations.torchrec.versions import lookup_arguments

_SHARDING_TYPES = {
    RwPooledEmbeddingSharding: ShardingType.ROW_WISE,
    TwRwPooledEmbeddingSharding: ShardingType.TABLE_ROW_WISE,
}
"""Of the shardings whose ranks hold parts of a bag, so that a mean is taken after the exchange."""


class PooledLookup(GroupedPooledEmbeddingsLookup):
    """Pooled vectors of the tables of one sharding on this rank.

    Args:
        memory: gives what the tables of each fused kernel are kept in, one after the other; None
            for memory of their own.
    """

    def __init__(self, memory: Iterator[Rows] | None, **arguments: Any) -> None:
        # Before what makes the kernels.
        self._memory = memory
        super().__init__(**arguments)

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        device: Any,
        pg: Any,
        sharding_type: ShardingType | None,
        env: Any,
    ) -> BaseEmbedding:
        if config.compute_kernel is EmbeddingComputeKernel.DENSE:
            return DenseBags(config, pg, device, sharding_type)
        memory = None if self._memory is None else next(self._memory)
        return FusedBags(config, pg, device, sharding_type, memory)

    def forward(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        # Dividing the features between kernels, TorchRec reads their lengths.
        is_plain = self.optim_state_tracker_fn is None and len(self._emb_modules) == 1
        if is_plain and not self.grouped_configs[0].is_weighted:
            return self._emb_modules[0](sparse_features)
        return super().forward(sparse_features)


class SequenceLookup(GroupedEmbeddingsLookup):
    """A vector for each id, of the tables of one sharding on this rank."""

    def _create_embedding_kernel(
        self, config: GroupedEmbeddingConfig, pg: Any, device: Any, env: Any = None
    ) -> BaseEmbedding:
        is_dense = config.compute_kernel is EmbeddingComputeKernel.DENSE
        return (DenseSequences if is_dense else FusedSequences)(config, pg, device)


def pooled_lookup_of(
    sharding: EmbeddingSharding[Any, Any, Any, Any], memory: Iterator[Rows] | None = None
) -> PooledLookup:
    """What stands where ``sharding.create_lookup()`` would; see :class:`PooledLookup`."""
    return PooledLookup(
        memory,
        **lookup_arguments(sharding)._asdict(),
        # The mean over ranks of data-parallel tables is DDP's, not the exchange's.
        scale_weight_gradients=not isinstance(sharding, DpPooledEmbeddingSharding),
        sharding_type=_SHARDING_TYPES.get(type(sharding)),
    )


def sequence_lookup_of(sharding: EmbeddingSharding[Any, Any, Any, Any]) -> SequenceLookup:
    """What stands where ``sharding.create_lookup()`` would."""
    return SequenceLookup(**lookup_arguments(sharding)._asdict())
