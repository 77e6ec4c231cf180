"""``EmbeddingBagCollection`` over several ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

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
from torchembed.modules.slots import select_features
from torchembed.ops.row_gradients import WeightGradient
from torchembed.sharding.plan import TablePlan
from torchembed.sharding.routes import FixedRoute, JaggedRoute


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
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        super().__init__(source, plans, mesh, device)
        self.embedding_bags = self._table_weights()
        self._is_weighted = source._is_weighted
        self._output_dtype = source._output_dtype
        self._weight_form = source._weight_form
        self._part_of_all = self._part(self._sharded_slots)
        slot_configs = [self._configs[table] for table in self._feature_slots.tables]
        self._widths = [config.embedding_dim for config in slot_configs]
        self._poolings = [config.pooling for config in slot_configs]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The whole tables' configs, in order."""
        return self._configs

    def is_weighted(self) -> bool:
        """True where ids have weights."""
        return self._is_weighted

    def forward(self, features: Any) -> Any:
        batch = weighted_as_asked(self._feature_slots.batch(features), self._is_weighted)
        batch = self._checked(batch)
        columns: dict[int, Tensor] = {}
        if self._sharded_slots:
            columns.update(self._sharded_columns(select_features(batch, self._sharded_slots)))
        if self._replicated_slots:
            replicated = self._replicated_slots
            vectors = pooled_slots(
                self._replicated,
                select_features(batch, replicated),
                [self._poolings[slot] for slot in replicated],
                self._output_dtype,
                WeightGradient.DENSE,
            )
            split = vectors.split([self._widths[slot] for slot in replicated], dim=1)
            columns.update(zip(replicated, split, strict=True))
        values = torch.cat([columns[slot] for slot in range(len(self._widths))], dim=1)
        return keyed_result(features, self._feature_slots.names, self._widths, values)

    def _sharded_columns(self, batch: SparseFeatures) -> dict[int, Tensor]:
        """``[B, D]`` for each sharded slot, from the ranks that hold its rows."""
        slots, layout, local = self._part_of_all
        route_kind = JaggedRoute if batch.hotness is None else FixedRoute
        route = route_kind(batch, layout, self._group, self._rank)
        blocks = layout.blocks[self._rank]
        pooled = pooled_slots(
            local,
            route.features,
            [Pooling.SUM] * len(blocks),
            self._output_dtype,
            self._weight_form,
        )
        widths = [[self._widths[slots[b.slot]] for b in blocks] for blocks in layout.blocks]
        returned = route.return_pooled(pooled, [sum(of_rank) for of_rank in widths])
        parts: dict[int, list[Tensor]] = {slot: [] for slot in slots}
        for rank_blocks, rank_widths, vectors in zip(layout.blocks, widths, returned, strict=True):
            for block, part in zip(rank_blocks, vectors.split(rank_widths, dim=1), strict=True):
                parts[slots[block.slot]].append(part)
        columns = {}
        for index, slot in enumerate(slots):
            column = parts[slot][0] if len(parts[slot]) == 1 else torch.stack(parts[slot]).sum(0)
            if self._poolings[slot] is Pooling.MEAN:
                column = column / bag_sizes(batch, index).to(column.dtype)
            columns[slot] = column
        return columns


def bag_sizes(batch: SparseFeatures, feature: int) -> Tensor:
    """Ids in each bag of a feature, at least 1; ``[B, 1]``."""
    num_samples = batch.batch_size
    if batch.hotness is not None:
        size = max(batch.hotness[feature], 1)
        return torch.full((num_samples, 1), size, device=batch.values.device)
    assert batch.offsets is not None
    bounds = batch.offsets[feature * num_samples : (feature + 1) * num_samples + 1]
    return bounds.diff().clamp_min(1).unsqueeze(1)
