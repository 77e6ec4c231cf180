"""``EmbeddingCollection`` over several ranks."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchembed.core.features import JaggedTensor, SparseFeatures, torchrec_class
from torchembed.modules.configs import EmbeddingConfig
from torchembed.modules.embedding_collection import (
    EmbeddingCollection,
    sequence_slots,
    split_slots,
)
from torchembed.modules.sharded_collection import ShardedCollection
from torchembed.modules.slots import SlotRows, select_features
from torchembed.ops.row_gradients import WeightGradient
from torchembed.sharding.layout import SlotPart
from torchembed.sharding.plan import TablePlan
from torchembed.sharding.ranks import Ranks
from torchembed.sharding.routes import JaggedRoute


class ShardedEmbeddingCollection(ShardedCollection):
    """Gives what the unsharded collection gives, for this rank's samples.

    Every rank calls it equally often, with any number of samples, also none. Gradients of the rows
    are the mean over ranks. Waits once a batch and width of shards for the sizes of what travels.
    """

    _container = "embeddings"

    def __init__(
        self,
        source: EmbeddingCollection,
        plans: Sequence[TablePlan],
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        super().__init__(source, plans, ranks, device)
        self.embeddings = self._table_weights()
        self._output_dtype = source._output_dtype
        self._weight_form = source._weight_form
        by_width: dict[int, list[SlotPart]] = {}
        for part in self._sharded_parts():
            by_width.setdefault(part.num_columns, []).append(part)
        self._by_width = {width: self._travellers(parts) for width, parts in by_width.items()}

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The whole tables' configs, in order."""
        return self._configs

    def _look_up(self, features: Any, lookups: "_Lookups") -> dict[str, Any]:
        found = self._sharded_vectors(lookups)
        if lookups.replicated is not None:
            looked_up = sequence_slots(lookups.replicated, self._output_dtype, WeightGradient.DENSE)
            found.update(zip(self._replicated_slots, looked_up, strict=True))
        kind = torchrec_class(features, "JaggedTensor") or JaggedTensor
        return {
            name: kind(values=found[slot][0], offsets=found[slot][1])
            for slot, name in enumerate(self._feature_slots.names)
        }

    def _prepare(self, features: SparseFeatures, *, finds_runs: bool) -> "_Lookups":
        batch = self._checked(with_offsets(self._feature_slots.batch(features)))
        by_width = {}
        for width, (parts, layout, local) in self._by_width.items():
            of_parts = select_features(batch, [part.slot for part in parts])
            route = JaggedRoute(of_parts, layout, self._ranks)
            rows = local.prepare(route.features, finds_runs=finds_runs)
            by_width[width] = _WidthLookups(of_parts, route, rows)
        replicated = None
        if self._replicated_slots:
            of_replicated = select_features(batch, self._replicated_slots)
            # The gradients of all ranks' rows replace this rank's, so its runs are of no use.
            replicated = self._replicated.prepare(of_replicated, finds_runs=False)
        return _Lookups(by_width, replicated)

    def _sharded_vectors(self, lookups: "_Lookups") -> dict[int, tuple[Tensor, Tensor]]:
        """For each sharded slot ``([ids, D], offsets [B + 1])``."""
        columns: dict[int, dict[int, Tensor]] = {}
        offsets: dict[int, Tensor] = {}
        for width, (of_parts, route, rows) in lookups.by_width.items():
            looked_up = sequence_slots(rows, self._output_dtype, self._weight_form)
            like = torch.empty(0, width, dtype=self._output_dtype, device=rows.device)
            vectors = torch.cat([like, *(values for values, _ in looked_up)])
            home = split_slots(of_parts, route.return_sequences(vectors))
            for part, (values, bags) in zip(self._by_width[width].parts, home, strict=True):
                columns.setdefault(part.slot, {})[part.shards[0].first_column] = values
                offsets[part.slot] = bags
        found = {}
        for slot, of_slot in columns.items():
            values = [of_slot[first_column] for first_column in sorted(of_slot)]
            joined = values[0] if len(values) == 1 else torch.cat(values, dim=1)
            found[slot] = (joined, offsets[slot])
        return found


class _WidthLookups(NamedTuple):
    """What the lookups of parts of one width need of a batch's ids."""

    features: SparseFeatures
    """One for each part."""
    route: JaggedRoute
    rows: SlotRows
    """This rank's, for all ranks' samples."""


class _Lookups(NamedTuple):
    by_width: dict[int, _WidthLookups]
    replicated: SlotRows | None


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
