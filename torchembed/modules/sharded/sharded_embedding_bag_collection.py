"""``EmbeddingBagCollection`` over several ranks."""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchembed.core.copies.columns import ColumnCopy
from torchembed.core.features import Features, SparseFeatures
from torchembed.core.lookup_results import KeyedTensor
from torchembed.core.types import Pooling
from torchembed.modules.collection_description import CollectionDescription
from torchembed.modules.configs import EmbeddingBagConfig
from torchembed.modules.embedding_bag_collection import (
    keyed_result,
    weighted_as_asked,
)
from torchembed.modules.lookup.feature_selection import (
    capacity_for,
    num_ids_of_features,
    select_features,
)
from torchembed.modules.lookup.pooled_slots import columns_of_slots, pooled_groups, pooled_slots
from torchembed.modules.lookup.slots import SlotRows
from torchembed.modules.sharded.sharded_collection import HeldTables, ShardedCollection
from torchembed.ops.row_gradients import WeightGradient
from torchembed.ops.side_by_side import after_reserved
from torchembed.sharding.planning.plan import TablePlan
from torchembed.sharding.transport.channel import PushDomain
from torchembed.sharding.transport.columns import place_columns
from torchembed.sharding.transport.fixed_route import FixedRoute
from torchembed.sharding.transport.jagged_route import JaggedRoute
from torchembed.sharding.transport.pooled_push import GroupVectors, PooledPush
from torchembed.sharding.transport.route import Route
from torchembed.sharding.transport.table_ranks import TableRanks
from torchembed.tables import Admission


class ShardedEmbeddingBagCollection(ShardedCollection["_BucketizedBags", "_RoutedBags", Tensor]):
    """Gives what the unsharded collection gives, for this rank's samples.

    Every rank calls it equally often, with any number of samples, also none. Gradients of the rows
    are the mean over ranks. With fixed hotness no GPU is waited for; jagged batches wait once for
    the sizes of the exchange, which a :class:`~torchembed.training.TrainPipeline` does ahead.
    """

    _configs: list[EmbeddingBagConfig]  # type: ignore[assignment]

    embedding_bags: nn.ModuleDict

    def __init__(
        self,
        description: CollectionDescription,
        plans: Sequence[TablePlan],
        ranks: TableRanks,
        held: HeldTables,
        device: torch.device,
    ) -> None:
        super().__init__(description, plans, ranks, held, device)
        self.reserved_columns = description.reserved_columns
        self._is_weighted = description.is_weighted
        domain = self._ranks.push
        self._push = None if domain is None else self._pooled_push(domain)

    def _divide_slots(self) -> None:
        self._sharded = self._slot_exchange(self._sharded_parts())
        slot_configs = [self._configs[table] for table in self._feature_slots.tables]
        self._widths = [config.embedding_dim for config in slot_configs]
        self._poolings = [config.pooling for config in slot_configs]

    def _take_slots(self, slots: tuple[int, ...]) -> None:
        super()._take_slots(slots)
        # Vectors are pushed to their columns among those of all slots.
        self._push = None

    def _set_output_dtype(self, dtype: torch.dtype) -> None:
        if self._push is not None and dtype is not self._output_dtype:
            raise ValueError(
                f"dtype of a model whose vectors are pushed must stay {self._output_dtype}, got "
                f"{dtype}; cast it before shard_embeddings"
            )
        super()._set_output_dtype(dtype)

    def _pooled_push(self, domain: PushDomain) -> PooledPush:
        """The push of vectors to their places among the values, but those of means, which are found
        from sums."""
        parts, layout, _ = self._sharded
        columns, firsts = dict.fromkeys(self._sharded_slots, 0), []
        starts = list(itertools.accumulate(self._widths, initial=self.reserved_columns))
        for part in parts:
            firsts.append(starts[part.slot] + columns[part.slot])
            columns[part.slot] += part.num_columns
        self._part_columns = firsts
        places = [
            first if self._poolings[part.slot] is Pooling.SUM else None
            for part, first in zip(parts, firsts, strict=True)
        ]
        widths = [self._widths[slot] for slot in self._replicated_slots]
        sources = itertools.accumulate(widths, initial=0)
        targets = [starts[slot] for slot in self._replicated_slots]
        copies = zip(sources, widths, targets, strict=False)
        self._replicated_copies = [ColumnCopy(*columns) for columns in copies]
        return PooledPush(layout, domain, self._ranks.wire, places, starts[-1], self._output_dtype)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The whole tables' configs, in order."""
        return self._configs

    def is_weighted(self) -> bool:
        """True where ids have weights."""
        return self._is_weighted

    def _exchange_sizes(self, features: SparseFeatures, *, ahead: bool) -> "_BucketizedBags":
        batch_sizes = None
        if ahead:
            # Whoever exchanges sizes ahead has agreed on the kind of batch with the other ranks.
            batch = self._batch_of(features)
        else:
            batch, batch_sizes = self._agreed_batch(features)
        route, num_replicated = self._jagged_route(batch), None
        if route is not None:
            numbers = num_ids_of_features(batch)
            route.exchange_sizes(ahead=ahead)
            num_ids = numbers.tolist()
            num_replicated = sum(num_ids[slot] for slot in self._replicated_slots)
        of_replicated = self._replicated_part(batch, num_replicated)
        return _BucketizedBags(batch, route, of_replicated, batch_sizes)

    def _bucketize(self, features: SparseFeatures) -> "_BucketizedBags":
        batch = self._batch_of(features, has_capacity=True)
        route = self._jagged_route(batch, has_capacity=True)
        num_replicated = capacity_for(batch, self._replicated_slots)
        return _BucketizedBags(batch, route, self._replicated_part(batch, num_replicated))

    def _needed_capacity(self, ids: "_BucketizedBags") -> Tensor | None:
        return None if ids.route is None else ids.route.needed_capacity().reshape(1)

    def _batch_of(self, features: SparseFeatures, *, has_capacity: bool = False) -> SparseFeatures:
        batch = self._feature_slots.batch(features, has_capacity=has_capacity)
        return self._checked(weighted_as_asked(batch, self._is_weighted))

    def _jagged_route(
        self, batch: SparseFeatures, *, has_capacity: bool = False
    ) -> JaggedRoute | None:
        """The route of the ids that are exchanged, where their lengths vary."""
        if not self._sharded_slots or batch.hotness is not None:
            return None
        parts, layout, _ = self._sharded
        slots = [part.slot for part in parts]
        num_ids = capacity_for(batch, slots) if has_capacity else None
        of_parts = select_features(batch, slots, num_ids)
        return JaggedRoute(of_parts, layout, self._ranks)

    def _replicated_part(self, batch: SparseFeatures, num_ids: int | None) -> SparseFeatures | None:
        """The features of the slots whose tables every rank holds."""
        if not self._replicated_slots:
            return None
        return select_features(batch, self._replicated_slots, num_ids)

    def _route(self, ids: "_BucketizedBags", capacity: Sequence[int] | None) -> "_RoutedBags":
        batch, jagged_route, of_replicated, batch_sizes = ids
        route = sharded = replicated = num_ids = None
        has_capacity = capacity is not None
        if self._sharded_slots:
            parts, layout, local = self._sharded
            if jagged_route is None:
                of_parts = [part.slot for part in parts]
                route = FixedRoute(batch, of_parts, layout, self._ranks, batch_sizes)
            else:
                jagged_route.exchange_ids(None if capacity is None else capacity[0])
                route, num_ids = jagged_route, jagged_route.num_ids_of_blocks
            sharded = local.route(
                route.features, num_ids, self._valid_ids(route), has_capacity=has_capacity
            )
        if of_replicated is not None:
            replicated = self._replicated.route(of_replicated, has_capacity=has_capacity)
        means = {s for s in self._sharded_slots if self._poolings[s] is Pooling.MEAN}
        sizes = {slot: self._bag_sizes(batch, slot) for slot in means}
        return _RoutedBags(route, sharded, replicated, sizes)

    def _valid_ids(self, route: Route) -> Tensor | None:
        """True for the ids that came to this rank and that its row indices look up, as
        :attr:`Route.is_valid`."""
        return route.is_valid

    def _bag_sizes(self, batch: SparseFeatures, slot: int) -> Tensor:
        """The divisors of the means of a slot's bags, ``[B, 1]``."""
        return bag_sizes(batch, slot)

    def _admit(
        self, ids: "_RoutedBags", admission: Admission | None, *, finds_runs: bool
    ) -> "_RoutedBags":
        sharded, replicated = ids.sharded, ids.replicated
        if sharded is not None:
            sharded = self._sharded.local.admit(sharded, admission, finds_runs=finds_runs)
        if replicated is not None:
            replicated = self._replicated.admit(replicated, admission, finds_runs=finds_runs)
        return ids._replace(sharded=sharded, replicated=replicated)

    def _fetch_refused(self, rows: "_RoutedBags") -> None:
        if rows.sharded is not None:
            self._sharded.local.fetch_refused(rows.sharded)
        if rows.replicated is not None:
            self._replicated.fetch_refused(rows.replicated)

    def _look_up(self, rows: "_RoutedBags", *, ahead: bool) -> Tensor:
        if self._push is not None and rows.sharded is not None:
            return self._pushed_values(rows, self._push, ahead=ahead)
        return self._exchanged_values(rows)

    def _in_order(self, parts: list[tuple[Sequence[int], Tensor]]) -> Tensor:
        return columns_of_slots(parts, self._widths, self.reserved_columns)

    def _result(self, features: Features, vectors: Tensor) -> KeyedTensor:
        values = after_reserved(vectors, self.reserved_columns)
        return keyed_result(features, self._feature_slots.names, self._widths, values)

    # Backward begins with what forward made last. What other ranks send is waited for, so the
    # exchange is last here; gradients of tables that every rank holds wait for all ranks, so their
    # lookup is first.

    def _exchanged_values(self, lookups: "_RoutedBags") -> Tensor:
        """The vectors of all slots side by side, by an all-to-all, after the reserved columns."""
        columns: dict[int, Tensor] = {}
        if lookups.replicated is not None:
            vectors = self._replicated_vectors(lookups.replicated)
            split = vectors.split([self._widths[slot] for slot in self._replicated_slots], dim=1)
            columns.update(zip(self._replicated_slots, split, strict=True))
        if lookups.sharded is not None:
            pooled = pooled_slots(*self._sums(lookups.sharded))
            columns.update(self._sharded_columns(lookups, pooled))
        in_order = [columns[slot] for slot in range(len(self._widths))]
        reserved = in_order[0].new_empty(in_order[0].shape[0], self.reserved_columns)
        return torch.cat([reserved, *in_order], dim=1)

    def _pushed_values(self, lookups: "_RoutedBags", push: PooledPush, *, ahead: bool) -> Tensor:
        """The vectors of the samples by push: each is stored where it belongs."""
        assert lookups.route is not None
        assert lookups.sharded is not None
        others: list[tuple[Tensor, list[ColumnCopy]]] = []
        if lookups.replicated is not None:
            vectors = self._replicated_vectors(lookups.replicated)
            others.append((vectors, self._replicated_copies))
        batch_sizes = lookups.route.batch_sizes
        store_of = functools.partial(push.store, batch_sizes=batch_sizes, ahead=ahead)
        pooled = pooled_groups(*self._sums(lookups.sharded), store_of)
        groups = [GroupVectors(*of_group) for of_group in pooled]
        values, staged = lookups.route.push_pooled(groups, push, others, ahead=ahead)
        means: list[tuple[Tensor, list[ColumnCopy]]] = []
        for part, total in staged:
            mean = total / lookups.bag_sizes[self._sharded.parts[part].slot].to(total.dtype)
            means.append((mean, [ColumnCopy(0, mean.shape[1], self._part_columns[part])]))
        return place_columns(values, means)

    def _replicated_vectors(self, replicated: SlotRows) -> Tensor:
        """The pooled vectors of the slots whose tables every rank holds."""
        poolings = [self._poolings[slot] for slot in self._replicated_slots]
        return pooled_slots(replicated, poolings, self._output_dtype, WeightGradient.DENSE)

    def _sums(
        self, sharded: SlotRows
    ) -> tuple[SlotRows, list[Pooling], torch.dtype, WeightGradient]:
        """The arguments that pool this rank's blocks: sums, which the samples' rank divides for
        means."""
        poolings = [Pooling.SUM] * len(self._sharded.layout.blocks[self._ranks.rank])
        return sharded, poolings, self._output_dtype, self._weight_form

    def _sharded_columns(self, lookups: "_RoutedBags", pooled: Tensor) -> dict[int, Tensor]:
        """``[B, D]`` for each sharded slot, from the ranks that hold its rows.

        ``pooled`` are the vectors of this rank's blocks, ``[all ranks' samples, columns]``.
        """
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


class _BucketizedBags(NamedTuple):
    """A batch with checked ids, and, where hotness is not fixed, the route of those exchanged."""

    batch: SparseFeatures
    route: JaggedRoute | None
    replicated: SparseFeatures | None
    """A feature for each replicated slot."""
    batch_sizes: Sequence[int] | None = None
    """Samples of each rank, where they are known."""


class _RoutedBags(NamedTuple):
    """A batch whose ids have been exchanged and turned into rows."""

    route: Route | None
    sharded: SlotRows | None
    """This rank's, for all ranks' samples."""
    replicated: SlotRows | None
    bag_sizes: dict[int, Tensor]
    """Bag sizes of the sharded slots whose pooling is the mean."""


def bag_sizes(batch: SparseFeatures, feature: int) -> Tensor:
    """Ids in each bag of a feature, at least 1; ``[B, 1]``."""
    num_samples = batch.batch_size
    if batch.hotness is not None:
        size = max(batch.hotness[feature], 1)
        return torch.full((num_samples, 1), size, device=batch.values.device)
    assert batch.offsets is not None
    bounds = batch.offsets[feature * num_samples : (feature + 1) * num_samples + 1]
    return bounds.diff().clamp_min(1).unsqueeze(1)
