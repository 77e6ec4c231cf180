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
    vectors_in_order,
)
from torchembed.modules.lookup.feature_selection import (
    capacity_for,
    lengths_of_features,
    num_ids_of_features,
    select_features,
)
from torchembed.modules.lookup.spread_ids import IdSpreader
from torchembed.modules.sharded.routed_sequences import (
    JaggedParts,
    SentSequences,
    returned_sequences,
    send_fixed,
    send_jagged,
)
from torchembed.modules.sharded.sharded_collection import HeldTables, ShardedCollection
from torchembed.ops.row_gradients import WeightGradient
from torchembed.sharding.planning.plan import TablePlan
from torchembed.sharding.transport.jagged_route import JaggedRoute
from torchembed.sharding.transport.layout import SlotPart
from torchembed.sharding.transport.table_ranks import TableRanks
from torchembed.tables import Admission


class ShardedEmbeddingCollection(
    ShardedCollection["_BucketizedSequences", "_RoutedSequences", SequenceVectors]
):
    """Gives what the unsharded collection gives, for this rank's samples.

    Every rank calls it equally often, with any number of samples, also none. Gradients of the rows
    are the mean over ranks. With fixed hotness no GPU is waited for, but where a table's rows are
    divided; jagged batches and those wait once for each width of shards for the sizes of the
    exchange, which a :class:`~torchembed.training.TrainPipeline` does ahead.
    """

    is_pooled = False
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

    def _divide_slots(self) -> None:
        by_width: dict[int, list[SlotPart]] = {}
        for part in self._sharded_parts():
            by_width.setdefault(part.num_columns, []).append(part)
        self._by_width = {width: self._slot_exchange(parts) for width, parts in by_width.items()}

    @property
    def always_waits_for_sizes(self) -> bool:
        """True where the rows of a table are divided: its ids go to one rank each, and how many go
        to which, their hotness does not say."""
        return any(exchange.layout.divides_rows for exchange in self._by_width.values())

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The whole tables' configs, in order."""
        return self._configs

    def _exchange_sizes(self, features: SparseFeatures, *, ahead: bool) -> "_BucketizedSequences":
        batch_sizes = None
        if ahead:
            # Whoever exchanges sizes ahead has agreed on the kind of batch with the other ranks.
            batch = self._batch_of(features)
        else:
            batch, batch_sizes = self._agreed_batch(features)
        bucketized = self._bucketized(batch, batch_sizes, has_capacity=False)
        replicated, by_width = bucketized.replicated, {}
        if replicated is not None and replicated.num_ids is None:
            numbers = num_ids_of_features(replicated.features).tolist()
            replicated = replicated._replace(num_ids=numbers)
        for width, parts in bucketized.by_width.items():
            parts.route.exchange_sizes(ahead=ahead)
            by_width[width] = parts._replace(num_ids=parts.route.num_ids_of_parts)
        return bucketized._replace(by_width=by_width, replicated=replicated)

    def _bucketize(self, features: SparseFeatures) -> "_BucketizedSequences":
        batch = self._batch_of(features, has_capacity=True)
        return self._bucketized(batch, None, has_capacity=True)

    def _bucketized(
        self, batch: SparseFeatures, batch_sizes: Sequence[int] | None, *, has_capacity: bool
    ) -> "_BucketizedSequences":
        """The ways of a batch's ids, before the sizes of jagged ones are known.

        Args:
            has_capacity: as of :meth:`~torchembed.modules.collection.FeatureSlots.batch`.
        """

        def selected(features: SparseFeatures, slots: list[int]) -> SparseFeatures:
            capacity = capacity_for(features, slots) if has_capacity else None
            return select_features(features, slots, capacity)

        by_width, hotness = {}, batch.hotness
        for width, (parts, layout, _) in self._by_width.items():
            if hotness is None or layout.divides_rows:
                slots = [part.slot for part in parts]
                of_parts, num_ids = selected(with_offsets(batch), slots), None
                if hotness is not None:
                    num_ids = [hotness[slot] * batch.batch_size for slot in slots]
                route = JaggedRoute(of_parts, layout, self._ranks)
                by_width[width] = JaggedParts(of_parts, route, num_ids)
        replicated = None
        if self._replicated_slots:
            of_replicated, num_ids = selected(batch, self._replicated_slots), None
            if of_replicated.hotness is not None:
                num_ids = [count * batch.batch_size for count in of_replicated.hotness]
            replicated = SizedFeatures(of_replicated, num_ids)
        return _BucketizedSequences(batch, by_width, replicated, batch_sizes)

    def _needed_capacity(self, ids: "_BucketizedSequences") -> Tensor | None:
        needed = [parts.needed_capacity() for parts in ids.by_width.values()]
        if ids.replicated is not None and ids.replicated.num_ids is None:
            needed.append(lengths_of_features(ids.replicated.features))
        return torch.cat([numbers.long() for numbers in needed]) if needed else None

    def _batch_of(self, features: SparseFeatures, *, has_capacity: bool = False) -> SparseFeatures:
        batch = self._feature_slots.batch(features, has_capacity=has_capacity)
        return self._checked(dataclasses.replace(batch, weights=None))

    def _route(
        self, ids: "_BucketizedSequences", capacity: Sequence[int] | None
    ) -> "_RoutedSequences":
        numbers = None if capacity is None else iter(capacity)
        by_width: dict[int, SentSequences] = {}
        for width, exchange in self._by_width.items():
            parts = ids.by_width.get(width)
            if parts is None:
                sent = send_fixed(exchange, ids.batch, self._ranks, ids.batch_sizes)
            else:
                sent = send_jagged(exchange, parts, self._spread_ids, numbers)
            by_width[width] = sent
        replicated = None
        if ids.replicated is not None:
            places = None if numbers is None else list(numbers)
            replicated = routed_sequences(
                self._replicated, ids.replicated, self._spread_ids, places
            )
        return _RoutedSequences(by_width, replicated)

    def _admit(
        self, ids: "_RoutedSequences", admission: Admission | None, *, finds_runs: bool
    ) -> "_RoutedSequences":
        by_width = {}
        for width, sent in ids.by_width.items():
            local = self._by_width[width].local
            rows = local.admit(sent.rows, admission, finds_runs=finds_runs)
            by_width[width] = sent._replace(rows=rows)
        replicated = ids.replicated
        if replicated is not None:
            rows = self._replicated.admit(replicated.rows, admission, finds_runs=finds_runs)
            replicated = replicated._replace(rows=rows)
        return _RoutedSequences(by_width, replicated)

    def _fetch_refused(self, rows: "_RoutedSequences") -> None:
        for width, sent in rows.by_width.items():
            self._by_width[width].local.fetch_refused(sent.rows)
        if rows.replicated is not None:
            self._replicated.fetch_refused(rows.replicated.rows)

    def _look_up(self, rows: "_RoutedSequences", *, ahead: bool) -> SequenceVectors:
        found = self._sharded_vectors(rows)
        if rows.replicated is not None:
            dense = WeightGradient.DENSE
            looked_up = sequence_slots(*rows.replicated, self._output_dtype, dense)
            found.update(zip(self._replicated_slots, looked_up, strict=True))
        return [found[slot] for slot in range(len(self._feature_slots.names))]

    def _in_order(self, parts: list[tuple[Sequence[int], SequenceVectors]]) -> SequenceVectors:
        return vectors_in_order(parts)

    def _result(self, features: Features, vectors: SequenceVectors) -> dict[str, JaggedTensor]:
        return jagged_result(features, self._feature_slots.names, vectors)

    def _sharded_vectors(self, lookups: "_RoutedSequences") -> dict[int, tuple[Tensor, Tensor]]:
        """For each sharded slot ``([ids, D], offsets [B + 1])``."""
        columns: dict[int, dict[int, Tensor]] = {}
        offsets: dict[int, Tensor] = {}
        for width, sent in lookups.by_width.items():
            home = returned_sequences(sent, width, self._output_dtype, self._weight_form)
            for part, (values, bags) in zip(self._by_width[width].parts, home, strict=True):
                columns.setdefault(part.slot, {})[part.shards[0].first_column] = values
                offsets[part.slot] = bags
        found = {}
        for slot, of_slot in columns.items():
            values = [of_slot[first_column] for first_column in sorted(of_slot)]
            joined = values[0] if len(values) == 1 else torch.cat(values, dim=1)
            found[slot] = (joined, offsets[slot])
        return found


class _BucketizedSequences(NamedTuple):
    """A batch with checked ids, and those that are sorted by rank."""

    batch: SparseFeatures
    """A feature for each slot."""
    by_width: dict[int, JaggedParts]
    """For widths whose ids no fixed numbers of go to each rank."""
    replicated: SizedFeatures | None
    """A feature for each replicated slot."""
    batch_sizes: Sequence[int] | None
    """Samples of each rank, where they are known."""


class _RoutedSequences(NamedTuple):
    """A batch whose ids have been exchanged and turned into rows."""

    by_width: dict[int, SentSequences]
    replicated: SizedRows | None
