"""Exchanges of ids whose ranks a hash chooses, as dynamic tables divide them, beside static ones.

TorchRec's exchanges send an id to the rank that holds its row, whose number it is, and make it a
number of one of the rank's rows. Here they are given, for an id of a dynamic table, the first row
of the rank that a hash chose; the ids themselves then take the places of what was bucketized so.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_sharding import (
    BaseSparseFeaturesDist,
    bucketize_kjt_before_all2all,
)
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.sharding.twrw_sharding import TwRwSparseFeaturesDist
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchembed.integrations.torchrec.plans.dynamic_tables import dynamic_settings
from torchembed.integrations.torchrec.versions import Sharding, exchange_of_rows, sent_configs
from torchembed.ops.linearize_ids.reference import id_features
from torchembed.sharding.planning.partition import HashPartition


class _HashedBuckets(nn.Module):
    """Bucketizes features by the ranks, of ``num_ranks``, that hold their ids' rows.

    Args:
        is_dynamic: for each feature whether its table is dynamic.
        block_sizes: int64 or int32 ``[F]``: rows of its table on each rank.
    """

    def __init__(self, is_dynamic: Sequence[bool], block_sizes: Tensor, num_ranks: int) -> None:
        super().__init__()
        self._partition = HashPartition(ranks=tuple(range(num_ranks)))
        device = block_sizes.device
        # Behind the last feature there is one more, of positions that no bag holds.
        is_free = torch.tensor([*is_dynamic, False], device=device)
        self.register_buffer("_is_dynamic", is_free, persistent=False)
        self.register_buffer("_block_sizes", block_sizes.long(), persistent=False)

    def forward(self, features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, Tensor]:
        """The features of each rank, rank by rank, and the position there of each of the ids.

        Raises:
            NotImplementedError: where keys have batch sizes of their own.
        """
        if features.variable_stride_per_key():
            raise NotImplementedError(
                "features of dynamic tables must have one batch size for all keys (no variable "
                "batch per feature); shard the tables table_wise or column_wise to use several"
            )
        blocks = cast("Tensor", self._block_sizes)
        ids = features.values().long()
        numbers = id_features(features.offsets(), [], features.stride(), len(ids), ids.device)
        is_dynamic = cast("Tensor", self._is_dynamic)[numbers]
        of_bags = numbers.clamp_max(len(blocks) - 1)
        first_rows = self._partition.places_of(ids) * blocks[of_bags]
        bucketized, positions = bucketize_kjt_before_all2all(
            _with_values(features, torch.where(is_dynamic, first_rows, ids)),
            num_buckets=len(self._partition.ranks),
            block_sizes=blocks,
            output_permute=True,
        )
        assert positions is not None
        places = positions.long()
        values = bucketized.values()
        moved = torch.empty_like(values).scatter_(0, places, ids)
        keeps_id = torch.empty_like(is_dynamic).scatter_(0, places, is_dynamic)
        return _with_values(bucketized, torch.where(keeps_id, moved, values)), positions


def _with_values(features: KeyedJaggedTensor, values: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=values,
        weights=features.weights_or_none(),
        lengths=features.lengths(),
        stride=features.stride(),
    )


class HashedRowWise(RwSparseFeaturesDist):
    """TorchRec's exchange of row-wise tables, some of which are dynamic."""

    def __init__(self, source: RwSparseFeaturesDist, is_dynamic: Sequence[bool]) -> None:
        nn.Module.__init__(self)
        parts = exchange_of_rows(source)
        self._buckets = _HashedBuckets(is_dynamic, parts.block_sizes, parts.num_ranks)
        self._dist = parts.exchange
        # Read where vectors of sequences come back; pooled ones need no order.
        self.unbucketize_permute_tensor: Tensor | None = None

    def forward(
        self, sparse_features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        bucketized, self.unbucketize_permute_tensor = self._buckets(sparse_features)
        return self._dist(bucketized)


class HashedTableRowWise(TwRwSparseFeaturesDist):
    """TorchRec's exchange of tables whose rows the ranks of a host share, some of them dynamic."""

    def __init__(self, source: TwRwSparseFeaturesDist, is_dynamic: Sequence[bool]) -> None:
        nn.Module.__init__(self)
        parts = exchange_of_rows(source)
        assert parts.order is not None
        self._buckets = _HashedBuckets(is_dynamic, parts.block_sizes, parts.num_ranks)
        self._order, order_tensor = parts.order
        self.register_buffer("_order_tensor", order_tensor, persistent=False)
        self._dist = parts.exchange

    def forward(
        self, sparse_features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        bucketized, _ = self._buckets(sparse_features)
        return self._dist(bucketized.permute(self._order, cast("Tensor", self._order_tensor)))


def with_hashed_ids(
    exchanges: Sequence[nn.Module], shardings: Sequence[Sharding]
) -> list[nn.Module]:
    """TorchRec's ``exchanges`` of ids, one for each of ``shardings``; in place of those that divide
    the rows of a dynamic table ones that hash its ids."""
    return [
        _with_hashed_ids(cast("BaseSparseFeaturesDist[KeyedJaggedTensor]", exchange), sharding)
        for exchange, sharding in zip(exchanges, shardings, strict=True)
    ]


def _with_hashed_ids(
    exchange: BaseSparseFeaturesDist[KeyedJaggedTensor], sharding: Sharding
) -> nn.Module:
    is_dynamic = [
        dynamic_settings(config) is not None
        for config in sent_configs(sharding)
        for _ in config.feature_names()
    ]
    if not any(is_dynamic):
        return exchange
    if isinstance(exchange, RwSparseFeaturesDist):
        return HashedRowWise(exchange, is_dynamic)
    if isinstance(exchange, TwRwSparseFeaturesDist):
        return HashedTableRowWise(exchange, is_dynamic)
    return exchange
