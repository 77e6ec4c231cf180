"""The base of the sharded collections: what this rank holds, and who looks up what."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchembed.core.features import SparseFeatures, with_offsets
from torchembed.core.types import OnBadId
from torchembed.modules.collection import Collection, FeatureSlots
from torchembed.modules.collection_description import CollectionDescription
from torchembed.modules.inside_ddp import DenseOwner
from torchembed.modules.lookup.bad_ids import BadIdReport
from torchembed.modules.lookup.bad_ids_of_slots import SlotName, submit_bad_id
from torchembed.modules.lookup.fetched_rows import submit_nothing_refused
from torchembed.modules.lookup.lookup_stages import B, R, V
from torchembed.modules.lookup.slots import Slots
from torchembed.modules.sharded.bound_to_ranks import BoundToRanks
from torchembed.modules.sharded.checked_ids import IdChecks
from torchembed.modules.sharded.local_table import local_table
from torchembed.modules.sharded.taken_rows import check_untrained, take_rows
from torchembed.modules.staged_collection import StagedCollection
from torchembed.modules.table_module import TableWeight
from torchembed.ops.row_gradients import WeightGradient
from torchembed.sharding.planning.plan import Placement, TablePlan
from torchembed.sharding.transport.batch_agreement import BatchKind, agree_on_batch
from torchembed.sharding.transport.data_parallel import max_over
from torchembed.sharding.transport.global_rows import (
    local_contents,
    local_part,
)
from torchembed.sharding.transport.layout import Layout, SlotPart, slot_parts
from torchembed.sharding.transport.table_ranks import TableRanks
from torchembed.tables import (
    CountedCaches,
    CountedTables,
    GrowingTables,
    Table,
    TableSet,
)


def _distribute(
    module: "ShardedCollection[B, R, V]", state: dict[str, Any], prefix: str, _: Any
) -> None:
    """After ``state_dict``: divided tables become ``DTensor``s over the ranks that hold them."""
    for table in module._local.values():
        of_table = f"{prefix}{module._container}.{table.spec.name}."
        state[f"{of_table}weight"] = table.as_global(state[f"{of_table}weight"])
        for name in table.index_contents():
            key = f"{of_table}index.{name}"
            state[key] = table.contents_as_global(state[key])


def _localize(module: "ShardedCollection", state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before ``load_state_dict``: each table becomes this rank's part of it.

    Takes ``DTensor``s as ``state_dict`` gives them, and whole tables as unsharded models have them.
    """
    held = {table.spec.name: table for table in module._local.values()}
    for config in module._configs:
        of_table, table = f"{prefix}{module._container}.{config.name}.", held.get(config.name)
        for key in [key for key in state if key.startswith(of_table)]:
            if table is None:
                del state[key]
            else:
                of_rows = key == f"{of_table}weight"
                state[key] = (local_part if of_rows else local_contents)(state[key], table)


class SlotExchange(NamedTuple):
    """Parts of slots whose ids are sent in one exchange, their layout, and this rank's lookups."""

    parts: list[SlotPart]
    layout: Layout
    local: Slots


class HeldTables(NamedTuple):
    """This rank's part of a collection's tables."""

    table_set: TableSet
    numbers: tuple[int, ...]
    """For each table of the set the number of its config."""
    names: tuple[str, ...]
    """For each table of the set the name under which its weight is a parameter."""


class ShardedCollection(BoundToRanks, StagedCollection[B, R, V]):
    """A collection whose tables are spread over the ranks of a mesh.

    Made by :func:`~torchembed.shard_embeddings` from an unsharded collection. Only what this rank
    holds of the tables is ever allocated. Parameters are this rank's shards, plain tensors. In
    ``state_dict`` a table whose rows or columns are divided is a ``DTensor`` over the ranks that
    hold a share of it; others have no entry for it, as they have none for another rank's table.
    """

    def __init__(
        self,
        description: CollectionDescription,
        plans: Sequence[TablePlan],
        ranks: TableRanks,
        held: HeldTables,
        device: torch.device,
    ) -> None:
        super().__init__()
        configs = description.configs
        self._configs = list(configs)
        self._feature_slots = FeatureSlots(configs)
        self._plans = list(plans)
        self._ranks, self._on_bad_id = ranks, description.on_bad_id
        self._output_dtype = description.output_dtype
        self._casts_vectors = description.casts_vectors
        self._weight_form = description.weight_form
        self.bad_ids = BadIdReport()
        names = ", ".join(config.name for config in configs)
        self._tables_in_words = f"tables {names} of {type(self).__name__}"
        self._num_lookups = 0
        """Number of lookups that were agreed on with the other ranks."""
        self._dense_owner = DenseOwner()
        self._table_set, self._weight_names = held.table_set, held.names
        numbered = list(zip(held.numbers, held.table_set.tables, strict=True))
        self._local: dict[int, Table] = dict(numbered)
        self._by_column = {(number, table.first_column): table for number, table in numbered}
        """Tables by number and first column, since a rank may hold columns of one table twice."""
        self._container = description.container
        """The attribute that holds the tables' weights."""
        self._hold_weights()
        self._assign_slots(device)
        self._divide_slots()

    @classmethod
    def of(
        cls, source: Collection, plans: Sequence[TablePlan], ranks: TableRanks, device: torch.device
    ) -> Self:
        """A collection that looks up what ``source`` does, with copies of its rows."""
        description, tables = source.description, source.table_set.tables
        local: dict[int, Table] = {}
        for number, (table, plan) in enumerate(zip(tables, plans, strict=True)):
            of_rank = local_table(table.spec, plan, ranks)
            if of_rank is not None:
                local[number] = of_rank
        keys = [description.lookup_keys[number] for number in local]
        table_set = TableSet(local.values(), keys, device)
        for number, table in local.items():
            check_untrained(tables[number])
            whole = tables[number].parameter
            table.parameter.requires_grad_(whole.requires_grad)
            # A dynamic table has no rows yet, and gets their values with their ids.
            if not whole.is_meta and not plans[number].takes_any_id:
                take_rows(table, local_part(whole.data, table))
        names = [table.spec.name for table in local.values()]
        held = HeldTables(table_set, tuple(local), tuple(names))
        made = cls(description, plans, ranks, held, device)
        made.register_state_dict_post_hook(_distribute)
        made.register_load_state_dict_pre_hook(_localize)
        made.take_mode_and_hooks(source)
        return made

    def _hold_weights(self) -> None:
        """Give the tables' weights their names as parameters."""
        named = zip(self._weight_names, self._table_set.tables, strict=True)
        weights = nn.ModuleDict({name: TableWeight(table) for name, table in named})
        self.add_module(self._container, weights)

    def _dynamic_names(self) -> list[str]:
        return [config.name for config in self._configs if config.dynamic is not None]

    def _features_of_slots(self) -> list[str]:
        return self._feature_slots.features

    def _take_slots(self, slots: tuple[int, ...]) -> None:
        self._feature_slots = self._feature_slots.subset(slots)
        self._assign_slots(self.device)
        self._divide_slots()

    def _divide_slots(self) -> None:
        """Find out which parts of slots are exchanged at once, once slots are assigned."""
        raise NotImplementedError

    def _assign_slots(self, device: torch.device) -> None:
        """Find out which slots' ids are exchanged, once this rank's tables are held."""
        tables, plans = self._feature_slots.tables, self._plans
        is_replicated = [plans[t].placement is Placement.DATA_PARALLEL for t in tables]
        self._replicated_slots = [s for s, replicated in enumerate(is_replicated) if replicated]
        self._sharded_slots = [s for s, replicated in enumerate(is_replicated) if not replicated]
        self._replicated = Slots(
            self._table_set,
            [self._local[tables[s]] for s in self._replicated_slots],
            [self._feature_slots.features[s] for s in self._replicated_slots],
            OnBadId.ZERO,
        )
        self._slot_names = [
            SlotName(self._configs[t].name, feature, self._configs[t].num_embeddings)
            for t, feature in zip(tables, self._feature_slots.features, strict=True)
        ]
        # An id is of the whole table, whatever the seed of its rows.
        self._num_ids = [self._configs[t].spec(seed=0).num_ids for t in tables]
        self._id_checks = IdChecks(self._num_ids, device)

    def _table_of(self, part: SlotPart) -> Table:
        """This rank's table for a part."""
        number = self._feature_slots.tables[part.slot]
        return self._by_column[number, part.shards[0].first_column]

    def _sharded_parts(self) -> list[SlotPart]:
        """The parts of all sharded slots, slot by slot and from left to right."""
        tables = self._feature_slots.tables
        return [p for s in self._sharded_slots for p in slot_parts(s, self._plans[tables[s]])]

    def _slot_exchange(self, parts: list[SlotPart]) -> SlotExchange:
        """The layout of ``parts`` over the ranks and the lookups of this rank's blocks of them."""
        layout = Layout(parts, self._ranks.mesh.size())
        mine = [parts[block.part] for block in layout.blocks[self._ranks.rank]]
        local = Slots(
            self._table_set,
            [self._table_of(part) for part in mine],
            [self._feature_slots.features[part.slot] for part in mine],
            OnBadId.ZERO,  # ids outside a shard's rows are other ranks'; bad ones were found before
        )
        return SlotExchange(parts, layout, local)

    def _holders(self) -> Iterable[tuple[Table, nn.Module]]:
        weights = self.get_submodule(self._container)
        named = zip(self._weight_names, self._table_set.tables, strict=True)
        return ((table, weights.get_submodule(name)) for name, table in named)

    @property
    def weight_form(self) -> WeightGradient:
        """The form of gradients of tables that no fused optimizer updates."""
        return self._weight_form

    @property
    def _admission_group(self) -> dist.ProcessGroup | None:
        return self._ranks.group

    @property
    def admission_changes_tables(self) -> bool:
        # The same on ranks that hold no part of such a table: steps are chosen by it.
        is_planned = any(plan.takes_any_id for plan in self._plans) or self.fetches_rows
        return is_planned or super().admission_changes_tables

    @property
    def fetches_rows(self) -> bool:
        # Likewise.
        return any(plan.storage is not None for plan in self._plans)

    def counted_tables(self) -> CountedTables:
        plans = zip(self._configs, self._plans, strict=True)
        dynamic = [n for n, (_, plan) in enumerate(plans) if plan.takes_any_id]
        self._table_set.current_groups()
        tables = {self._configs[number].name: self._local.get(number) for number in dynamic}
        return CountedTables(tables, self.device, self._ranks.group)

    def _submit_fetch(self) -> None:
        if self.fetches_rows:
            submit_nothing_refused(self.device, self.bad_ids)

    def counted_caches(self, name: str) -> CountedCaches[str]:
        caches = {name: self.tiered_groups()} if self.fetches_rows else {}
        return CountedCaches(caches, self.device, self._ranks.group)

    def growing_tables(self) -> GrowingTables | None:
        if self._growth.is_over:
            return None
        # On all ranks the same tables, whichever hold parts of them.
        grow = [n for n, c in enumerate(self._configs) if c.spec(seed=0).index.grows]
        if not grow:
            self._growth.is_over = True
            return None
        self._table_set.current_groups()
        held = self._by_column.items()
        parts = [[table for (number, _), table in held if number == n] for n in grow]
        return GrowingTables(parts, self.device, max_over(self._ranks.group))

    @property
    def device(self) -> torch.device:
        """The device of this rank's rows."""
        return self._id_checks.device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ShardedCollection":
        super()._apply(fn, recurse)
        # fn may leave contents undefined, as to_empty's does, so that only its device is asked.
        device = fn(torch.empty(0, device=self.device)).device
        self._id_checks = IdChecks(self._num_ids, device)
        return self

    def _checked(self, batch: SparseFeatures) -> SparseFeatures:
        """``batch`` with -1 (or the nearest id) for each id outside its table.

        Raises:
            IndexError: under ``OnBadId.RAISE``, on the rank whose batch holds the bad id.
        """
        rows, first_bad = self._id_checks(batch, self._on_bad_id)
        if self._on_bad_id is OnBadId.RAISE:
            submit_bad_id(batch, first_bad, self._slot_names, self.bad_ids)
        return SparseFeatures(
            keys=batch.keys,
            values=rows,
            batch_size=batch.batch_size,
            offsets=batch.offsets,
            hotness=batch.hotness,
            weights=batch.weights,
        )

    def forward(self, features: Any) -> Any:
        if torch.is_grad_enabled():
            self._dense_owner.note_forward(self, self._ranks.gradient_mean)
        return super().forward(features)

    def _batch_of(self, features: SparseFeatures, *, has_capacity: bool = False) -> SparseFeatures:
        """``features`` with a feature for each slot and checked ids.

        Args:
            has_capacity: as of :meth:`~torchembed.modules.collection.FeatureSlots.batch`.

        Raises:
            IndexError, ValueError: for features that the collection cannot look up.
        """
        raise NotImplementedError

    def _agreed_batch(
        self, features: SparseFeatures
    ) -> tuple[SparseFeatures, Sequence[int] | None]:
        """:meth:`_batch_of`, and the samples of each rank; where hotness is not the same on all of
        them, with offsets in its place. Collective where a table is sharded, without a GPU.

        Raises:
            IndexError, ValueError: for features that the collection cannot look up.
            RuntimeError: where those of another rank cannot be looked up; it names the rank.
            ValueError: where the ranks' features differ in weights.
        """
        if not self._sharded_slots:
            return self._batch_of(features), None
        batch = None
        try:
            batch = self._batch_of(features)
            kind: BatchKind | Exception = BatchKind.of(batch, self._tables_in_words)
        except Exception as error:  # noqa: BLE001 - raised below, once all ranks know of it
            kind = error
        number, self._num_lookups = self._num_lookups, self._num_lookups + 1
        agreed = agree_on_batch(kind, features.batch_size, self._ranks.group, number=number)
        assert batch is not None
        if not agreed.have_same_hotness:
            batch = with_offsets(batch)
        return batch, agreed.batch_sizes

    def agreed_capacity(self, needed: Sequence[int]) -> list[int]:
        if not needed:
            return []
        numbers = torch.tensor(needed, dtype=torch.int64, device="cpu")
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._ranks.sizes_group)
        return numbers.tolist()

    def check_ids(self) -> None:
        """Wait for the GPU and raise for a bad id of any batch so far; on the CPU nothing waits."""
        self.bad_ids.check(wait=True)
