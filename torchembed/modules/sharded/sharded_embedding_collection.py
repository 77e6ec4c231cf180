"""``EmbeddingCollection`` over several ranks."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchembed.core.features import Features, SparseFeatures, with_offsets
from torchembed.core.lookup_results import JaggedTensor
from torchembed.modules.collection_description import CollectionDescription
from torchembed.modules.configs import EmbeddingConfig
from torchembed.modules.embedding_collection import (
    SequenceVectors,
    SizedFeatures,
    SizedRows,
    jagged_result,
    routed_sequences,
    sequence_slots,
    split_slots,
)
from torchembed.modules.feature_selection import num_ids_of_features, select_features
from torchembed.modules.sharded.sharded_collection import HeldTables, ShardedCollection
from torchembed.modules.slots import SlotRows
from torchembed.modules.spread_ids import IdSpreader
from torchembed.ops.row_gradients import WeightGradient
from torchembed.sharding.planning.plan import TablePlan
from torchembed.sharding.transport.layout import SlotPart
from torchembed.sharding.transport.routes import JaggedRoute
from torchembed.sharding.transport.table_ranks import TableRanks
from torchembed.tables import Admission


class ShardedEmbeddingCollection(
    ShardedCollection["_BucketizedSequences", "_RoutedSequences", SequenceVectors]
):
    """Gives what the unsharded collection gives, for this rank's samples.

    Every rank calls it equally often, with any number of samples, also none. Gradients of the rows
    are the mean over ranks. Waits once a batch and width of shards for the sizes of the exchange,
    which a :class:`~torchembed.training.TrainPipeline` does ahead.
    """

    is_pooled = False
    always_waits_for_sizes = True
    embeddings: nn.ModuleDict

    def __init__(
        self,
        description: CollectionDescription,
        plans: Sequence[TablePlan],
        ranks: TableRanks,
        held: HeldTables,
        device: torch.device,
    ) -> None:
        super().__init__(description, plans, ranks, held, device)
        self._spread_ids = IdSpreader()
        by_width: dict[int, list[SlotPart]] = {}
        for part in self._sharded_parts():
            by_width.setdefault(part.num_columns, []).append(part)
        self._by_width = {width: self._slot_exchange(parts) for width, parts in by_width.items()}

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The whole tables' configs, in order."""
        return self._configs

    def _exchange_sizes(self, features: SparseFeatures, *, ahead: bool) -> "_BucketizedSequences":
        batch = self._batch_of(features) if ahead else self._agreed_batch(features)[0]
        routes = {}
        for width, (parts, layout, _) in self._by_width.items():
            of_parts = select_features(batch, [part.slot for part in parts])
            routes[width] = (of_parts, JaggedRoute(of_parts, layout, self._ranks))
        replicated = None
        if self._replicated_slots:
            of_replicated = select_features(batch, self._replicated_slots)
            numbers = num_ids_of_features(of_replicated)
            replicated = SizedFeatures(of_replicated, numbers.tolist())
        for _, route in routes.values():
            route.exchange_sizes(self._sizes_group(ahead=ahead))
        return _BucketizedSequences(routes, replicated)

    def _batch_of(self, features: SparseFeatures) -> SparseFeatures:
        batch = dataclasses.replace(self._feature_slots.batch(features), weights=None)
        return self._checked(with_offsets(batch))

    def _route(
        self, ids: "_BucketizedSequences", capacity: Sequence[int] | None
    ) -> "_RoutedSequences":
        by_width = {}
        for width, (of_parts, route) in ids.routes.items():
            route.exchange_ids()
            num_ids, local = route.num_ids_of_blocks, self._by_width[width].local
            rows = local.route(route.features, num_ids)
            by_width[width] = _WidthLookups(of_parts, route, rows)
        replicated = None
        if ids.replicated is not None:
            replicated = routed_sequences(
                self._replicated, ids.replicated, self._spread_ids, capacity
            )
        return _RoutedSequences(by_width, replicated)

    def _admit(
        self, ids: "_RoutedSequences", admission: Admission | None, *, finds_runs: bool
    ) -> "_RoutedSequences":
        by_width = {}
        for width, of_width in ids.by_width.items():
            local = self._by_width[width].local
            rows = local.admit(of_width.rows, admission, finds_runs=finds_runs)
            by_width[width] = of_width._replace(rows=rows)
        replicated = ids.replicated
        if replicated is not None:
            rows = self._replicated.admit(replicated.rows, admission, finds_runs=finds_runs)
            replicated = replicated._replace(rows=rows)
        return _RoutedSequences(by_width, replicated)

    def _look_up(self, rows: "_RoutedSequences", *, ahead: bool) -> SequenceVectors:
        found = self._sharded_vectors(rows)
        if rows.replicated is not None:
            dense = WeightGradient.DENSE
            looked_up = sequence_slots(*rows.replicated, self._output_dtype, dense)
            found.update(zip(self._replicated_slots, looked_up, strict=True))
        return [found[slot] for slot in range(len(self._feature_slots.names))]

    def _result(self, features: Features, vectors: SequenceVectors) -> dict[str, JaggedTensor]:
        return jagged_result(features, self._feature_slots.names, vectors)

    def _sharded_vectors(self, lookups: "_RoutedSequences") -> dict[int, tuple[Tensor, Tensor]]:
        """For each sharded slot ``([ids, D], offsets [B + 1])``."""
        columns: dict[int, dict[int, Tensor]] = {}
        offsets: dict[int, Tensor] = {}
        for width, (of_parts, route, rows) in lookups.by_width.items():
            num_ids = route.num_ids_of_blocks
            assert num_ids is not None
            looked_up = sequence_slots(rows, num_ids, None, self._output_dtype, self._weight_form)
            like = torch.empty(0, width, dtype=self._output_dtype, device=rows.device)
            vectors = torch.cat([like, *(values for values, _ in looked_up)])
            returned = route.return_sequences(vectors)
            home = split_slots(of_parts, route.num_ids_of_parts, returned)
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
    """The exchanged ids of parts of one width, and their rows."""

    features: SparseFeatures
    """One for each part."""
    route: JaggedRoute
    rows: SlotRows
    """This rank's, for all ranks' samples."""


class _BucketizedSequences(NamedTuple):
    """The ways of a batch's ids, by width, each with a feature for each part."""

    routes: dict[int, tuple[SparseFeatures, JaggedRoute]]
    replicated: SizedFeatures | None


class _RoutedSequences(NamedTuple):
    by_width: dict[int, _WidthLookups]
    replicated: SizedRows | None
