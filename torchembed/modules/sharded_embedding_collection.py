"""``EmbeddingCollection`` over several ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchembed.core.features import JaggedTensor, SparseFeatures, torchrec_class
from torchembed.modules.configs import EmbeddingConfig
from torchembed.modules.embedding_collection import (
    EmbeddingCollection,
    sequence_slots,
    split_slots,
)
from torchembed.modules.sharded_collection import ShardedCollection
from torchembed.modules.slots import select_features
from torchembed.ops.row_gradients import WeightGradient
from torchembed.sharding.plan import TablePlan
from torchembed.sharding.routes import JaggedRoute


class ShardedEmbeddingCollection(ShardedCollection):
    """Gives what the unsharded collection gives, for this rank's samples.

    Every rank calls it equally often, with any number of samples, also none. Gradients of the rows
    are the mean over ranks. Waits once a batch and dim for the sizes of what travels.
    """

    _container = "embeddings"

    def __init__(
        self,
        source: EmbeddingCollection,
        plans: Sequence[TablePlan],
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        super().__init__(source, plans, mesh, device)
        self.embeddings = self._table_weights()
        self._output_dtype = source._output_dtype
        self._weight_form = source._weight_form
        by_dim: dict[int, list[int]] = {}
        for slot in self._sharded_slots:
            dim = self._configs[self._feature_slots.tables[slot]].embedding_dim
            by_dim.setdefault(dim, []).append(slot)
        self._parts = {dim: self._part(slots) for dim, slots in by_dim.items()}

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The whole tables' configs, in order."""
        return self._configs

    def forward(self, features: Any) -> dict[str, Any]:
        batch = self._checked(with_offsets(self._feature_slots.batch(features)))
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for dim, (slots, layout, local) in self._parts.items():
            part = select_features(batch, slots)
            route = JaggedRoute(part, layout, self._group, self._rank)
            looked_up = sequence_slots(local, route.features, self._output_dtype, self._weight_form)
            like = torch.empty(0, dim, dtype=self._output_dtype, device=batch.values.device)
            vectors = torch.cat([like, *(values for values, _ in looked_up)])
            home = route.return_sequences(vectors)
            found.update(zip(slots, split_slots(part, home), strict=True))
        if self._replicated_slots:
            part = select_features(batch, self._replicated_slots)
            looked_up = sequence_slots(
                self._replicated, part, self._output_dtype, WeightGradient.DENSE
            )
            found.update(zip(self._replicated_slots, looked_up, strict=True))
        kind = torchrec_class(features, "JaggedTensor") or JaggedTensor
        return {
            name: kind(values=found[slot][0], offsets=found[slot][1])
            for slot, name in enumerate(self._feature_slots.names)
        }


def with_offsets(batch: SparseFeatures) -> SparseFeatures:
    """``batch`` with offsets in place of fixed hotness, and without weights."""
    offsets = batch.offsets
    if batch.hotness is not None:
        device = batch.values.device
        lengths = torch.tensor(batch.hotness, device=device).repeat_interleave(batch.batch_size)
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return SparseFeatures(
        keys=batch.keys, values=batch.values, batch_size=batch.batch_size, offsets=offsets
    )
