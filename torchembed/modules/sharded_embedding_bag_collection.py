"""``EmbeddingBagCollection`` over several ranks."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.core.types import Pooling
from torchembed.modules.configs import EmbeddingBagConfig
from torchembed.modules.embedding_bag_collection import (
    EmbeddingBagCollection,
    keyed_result,
    weighted_as_asked,
)
from torchembed.modules.pooled_slots import pooled_slots
from torchembed.modules.sharded_collection import ShardedCollection
from torchembed.modules.slots import SlotRows, select_features
from torchembed.ops.row_gradients import WeightGradient
from torchembed.sharding.plan import TablePlan
from torchembed.sharding.ranks import Ranks
from torchembed.sharding.routes import FixedRoute, JaggedRoute, Route


class ShardedEmbeddingBagCollection(ShardedCollection):
    """Gives what the unsharded collection gives, for this rank's samples.

    Every rank calls it equally often, with any number of samples, also none. Gradients of the rows
    are the mean over ranks. With fixed hotness no GPU is waited for; jagged batches wait once for
    the sizes of what travels.
    """

    _configs: list[EmbeddingBagConfig]  # type: ignore[assignment]

    _container = "embedding_bags"

    def __init__(
        self,
        source: EmbeddingBagCollection,
        plans: Sequence[TablePlan],
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        super().__init__(source, plans, ranks, device)
        self.embedding_bags = self._table_weights()
        self._is_weighted = source._is_weighted
        self._output_dtype = source._output_dtype
        self._weight_form = source._weight_form
        self._sharded = self._travellers(self._sharded_parts())
        slot_configs = [self._configs[table] for table in self._feature_slots.tables]
        self._widths = [config.embedding_dim for config in slot_configs]
        self._poolings = [config.pooling for config in slot_configs]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The whole tables' configs, in order."""
        return self._configs

    def is_weighted(self) -> bool:
        """True where ids have weights."""
        return self._is_weighted

    def _look_up(self, features: Any, lookups: "_Lookups") -> Any:
        columns: dict[int, Tensor] = {}
        pooled = None if lookups.sharded is None else self._pooled(lookups.sharded)
        if lookups.replicated is not None:
            replicated = self._replicated_slots
            vectors = pooled_slots(
                lookups.replicated,
                [self._poolings[slot] for slot in replicated],
                self._output_dtype,
                WeightGradient.DENSE,
            )
            split = vectors.split([self._widths[slot] for slot in replicated], dim=1)
            columns.update(zip(replicated, split, strict=True))
        if pooled is not None:
            # Made last, the exchange is first in backward: what it brings is waited for.
            columns.update(self._sharded_columns(lookups, pooled))
        values = torch.cat([columns[slot] for slot in range(len(self._widths))], dim=1)
        return keyed_result(features, self._feature_slots.names, self._widths, values)

    def _prepare(self, features: SparseFeatures, *, finds_runs: bool) -> "_Lookups":
        batch = weighted_as_asked(self._feature_slots.batch(features), self._is_weighted)
        batch = self._checked(batch)
        route = sharded = replicated = None
        if self._sharded_slots:
            parts, layout, local = self._sharded
            of_parts = select_features(batch, [part.slot for part in parts])
            route_kind = JaggedRoute if batch.hotness is None else FixedRoute
            route = route_kind(of_parts, layout, self._ranks)
            sharded = local.prepare(route.features, finds_runs=finds_runs)
        if self._replicated_slots:
            of_replicated = select_features(batch, self._replicated_slots)
            # The gradients of all ranks' rows replace this rank's, so its runs are of no use.
            replicated = self._replicated.prepare(of_replicated, finds_runs=False)
        means = {s for s in self._sharded_slots if self._poolings[s] is Pooling.MEAN}
        sizes = {slot: bag_sizes(batch, slot) for slot in means}
        return _Lookups(route, sharded, replicated, sizes)

    def _pooled(self, sharded: SlotRows) -> Tensor:
        """``[all ranks' samples, columns]``: the vectors of this rank's blocks side by side."""
        num_blocks = len(self._sharded.layout.blocks[self._ranks.rank])
        return pooled_slots(
            sharded, [Pooling.SUM] * num_blocks, self._output_dtype, self._weight_form
        )

    def _sharded_columns(self, lookups: "_Lookups", pooled: Tensor) -> dict[int, Tensor]:
        """``[B, D]`` for each sharded slot, from the ranks that hold its rows."""
        assert lookups.route is not None
        by_slot: dict[int, list[Tensor]] = {}
        returned = lookups.route.return_pooled(pooled)
        for part, vectors in zip(self._sharded.parts, returned, strict=True):
            by_slot.setdefault(part.slot, []).append(vectors)
        columns = {}
        for slot, vectors in by_slot.items():
            column = vectors[0] if len(vectors) == 1 else torch.cat(vectors, dim=1)
            if slot in lookups.bag_sizes:
                column = column / lookups.bag_sizes[slot].to(column.dtype)
            columns[slot] = column
        return columns


class _Lookups(NamedTuple):
    """What a batch's lookups need of its ids."""

    route: Route | None
    sharded: SlotRows | None
    """This rank's, for all ranks' samples."""
    replicated: SlotRows | None
    bag_sizes: dict[int, Tensor]
    """Of the sharded slots whose pooling is the mean."""


def bag_sizes(batch: SparseFeatures, feature: int) -> Tensor:
    """Ids in each bag of a feature, at least 1; ``[B, 1]``."""
    num_samples = batch.batch_size
    if batch.hotness is not None:
        size = max(batch.hotness[feature], 1)
        return torch.full((num_samples, 1), size, device=batch.values.device)
    assert batch.offsets is not None
    bounds = batch.offsets[feature * num_samples : (feature + 1) * num_samples + 1]
    return bounds.diff().clamp_min(1).unsqueeze(1)
