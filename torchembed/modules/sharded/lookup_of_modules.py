"""One exchange for modules of one sharded table each: their ids out, their pooled vectors back."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchembed.core.features import SparseFeatures
from torchembed.core.types import OnBadId, Pooling
from torchembed.modules.collection_description import CollectionDescription
from torchembed.modules.configs import EmbeddingBagConfig
from torchembed.modules.lookup.awaited_admission import awaited_admission
from torchembed.modules.lookup.bad_ids_of_slots import SlotName
from torchembed.modules.lookup.forward_admission import admission_in_forward
from torchembed.modules.lookup.group_rows import GroupRows, UntrainedSlots
from torchembed.modules.lookup.lookup_stages import Admitted
from torchembed.modules.sharded.sharded_collection import HeldTables
from torchembed.modules.sharded.sharded_embedding_bag_collection import (
    ShardedEmbeddingBagCollection,
)
from torchembed.ops.linearize_ids.reference import id_features
from torchembed.ops.row_gradients import WeightGradient
from torchembed.sharding.planning.plan import TablePlan
from torchembed.sharding.transport.layout import Block
from torchembed.sharding.transport.route import Route
from torchembed.sharding.transport.table_ranks import TableRanks
from torchembed.tables import Dynamic, Table, TableGroup, TableSet, TableSpec


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ModuleTable:
    """The table of one module, as every rank knows it.

    Attributes:
        name: name of the module in the model.
        spec: of the whole table.
        plan: where its rows and columns are.
        local: this rank's part; None where it has none.
        pooling: of its lookups.
        padding: id that counts for nothing, in means neither; None for none.
        untrained: id whose vector is looked up as any other, and never trained; None for none.
        dynamic: policies of a dynamic table.
    """

    name: str
    spec: TableSpec
    plan: TablePlan
    local: Table | None
    pooling: Pooling
    padding: int | None
    untrained: int | None = None
    dynamic: Dynamic | None = None


class LookupSettings(NamedTuple):
    """The properties that lookups of modules must share to be done in one exchange."""

    ranks: TableRanks
    on_bad_id: OnBadId
    weight_form: WeightGradient
    dtype: torch.dtype
    """The dtype of the weights, and of what the modules return."""
    device: torch.device
    is_weighted: bool
    """True where ids have weights."""


class _TablesOfModules(TableSet):
    """Tables of several modules, by the groups that one update trains.

    They belong to their modules' own sets, which see to parameters that change.
    """

    def __init__(self, tables: Iterable[Table]) -> None:
        self.tables = list(tables)
        self.groups = []

    def current_groups(self) -> list[TableGroup]:
        for table in self.tables:
            table.owner.current_groups()
        groups = list(dict.fromkeys(map(_looked_up_group, self.tables)))
        if groups != self.groups:
            self.groups = groups
        return self.groups


def _looked_up_group(table: Table) -> TableGroup:
    """The group in which to look ``table`` up: the joined one, where one lookup can read the
    weights of all its tables and train them."""
    joined = table.group.joined
    if joined is None:
        return table.group
    trains = all(t.parameter.requires_grad and t.holds_parameter() for t in joined.tables)
    return joined if trains else table.group


class LookupOfModules(ShardedEmbeddingBagCollection):
    """Pooled lookups in the tables of separate modules, over all ranks, in float32.

    It holds no parameters: they are the modules'. Its features are the uses, by their numbers.

    Args:
        uses: the table of each lookup, some perhaps more than once.
        settings: of all of them.
    """

    def __init__(self, uses: Sequence[ModuleTable], settings: LookupSettings) -> None:
        numbers: dict[ModuleTable, list[int]] = {}
        for number, use in enumerate(uses):
            numbers.setdefault(use, []).append(number)
        configs = [
            EmbeddingBagConfig(
                name=f"table_{number}",
                num_embeddings=table.spec.num_rows,
                embedding_dim=table.spec.dim,
                feature_names=tuple(map(str, of_table)),
                dtype=table.spec.dtype,
                pooling=table.pooling,
                dynamic=table.dynamic,
                storage=table.plan.storage,
            )
            for number, (table, of_table) in enumerate(numbers.items())
        ]
        description = CollectionDescription(
            configs=tuple(configs),
            container="",
            is_pooled=True,
            is_weighted=settings.is_weighted,
            on_bad_id=settings.on_bad_id,
            # Sums that several ranks add are rounded to the weights' dtype once, at the end.
            output_dtype=torch.float32,
            weight_form=settings.weight_form,
            lookup_keys=(None,) * len(configs),
        )
        held = [(n, t.local) for n, t in enumerate(numbers) if t.local is not None]
        names = tuple(configs[number].name for number, _ in held)
        tables = HeldTables(
            _TablesOfModules(table for _, table in held), tuple(n for n, _ in held), names
        )
        plans, device = [table.plan for table in numbers], settings.device
        super().__init__(description, plans, settings.ranks, tables, device)
        self.uses_of_slots = list(map(int, self._feature_slots.features))
        """For each slot, in the order of the columns, the number of its use."""
        of_slots = [uses[number] for number in self.uses_of_slots]
        self._slot_names = [SlotName(use.name, "input", use.spec.num_rows) for use in of_slots]
        self._tables_in_words = f"tables {', '.join(table.name for table in numbers)}"
        self.widths = [use.spec.dim for use in of_slots]
        """The columns of each slot's vectors."""
        self._padding = [use.padding for use in of_slots]
        self._is_dynamic = [use.dynamic is not None for use in of_slots]
        paddings = [
            _NO_ID if use.padding is None or use.dynamic is not None else use.padding
            for use in of_slots
        ]
        self._replaces_padding = any(padding != _NO_ID for padding in paddings)
        parts = self._sharded.parts
        self._slots_of_blocks = [parts[b.part].slot for b in self._blocks_here()]
        """For each of this rank's blocks its slot."""
        self._untrained = [of_slots[slot].untrained for slot in self._slots_of_blocks]
        """For each of them the id that is not trained."""
        # Behind the last bag there is one more slot.
        self._paddings = torch.tensor([*paddings, _NO_ID], device=device)
        is_static = [padding != _NO_ID for padding in paddings]
        self._replaces = torch.tensor([*is_static, False], device=device)
        dynamic = [
            self._padding[slot] if self._is_dynamic[slot] else None
            for slot in self._slots_of_blocks
        ]
        self._block_paddings = dynamic
        """For each of this rank's blocks of a dynamic table the id that is padding, if any."""
        ids = [*(0 if padding is None else padding for padding in dynamic), 0]
        has_padding = [*(padding is not None for padding in dynamic), False]
        self._paddings_here = torch.tensor(ids, device=device)
        self._have_padding_here = torch.tensor(has_padding, device=device)

    def _hold_weights(self) -> None:
        """The modules hold them."""

    def _holders(self) -> Iterable[tuple[Table, nn.Module]]:
        return ()

    def vectors(self, features: SparseFeatures, *, admits: bool) -> Tensor:
        """The pooled vectors of all uses, ``[B, columns]``, slot by slot. Collective.

        Args:
            features: one for each use, whose key is its number.
            admits: whether dynamic tables give rows to new ids, and those in host memory bring
                rows to the device.

        Raises:
            IndexError, RuntimeError, ValueError: as ``forward`` of a sharded collection.
        """
        admits = admits and self.admission_changes_tables
        with awaited_admission() if admits else contextlib.nullcontext():
            rows = self._route(self._exchange_sizes(features, ahead=False), None)
        if admits:
            rows = self._admit(rows, admission_in_forward(self._ranks.group), finds_runs=False)
            self._submit_fetch()
        return self._look_up(rows, ahead=False)

    def most_ids_sent(self, most_ids: Sequence[int]) -> int:
        """The most ids that one rank can send to one, where ``most_ids`` is the most ids of each
        use on any rank."""
        parts, layout, _ = self._sharded
        of_parts = [most_ids[self.uses_of_slots[part.slot]] for part in parts]
        return max(sum(of_parts[block.part] for block in blocks) for blocks in layout.blocks)

    def leaving_out(
        self, admitted: Admitted[Any]
    ) -> tuple[Admitted[Any], Callable[[Iterable[int]], None]]:
        """``admitted`` for a lookup whose backward may leave out slots, and a function by which it
        says which, before gradients of rows come."""
        untrained, sharded = UntrainedSlots(), admitted.rows.sharded
        groups = [of_group._replace(untrained=untrained) for of_group in sharded.groups]
        rows = admitted.rows._replace(sharded=sharded._replace(groups=groups))

        def leave_out(slots: Iterable[int]) -> None:
            left_out = set(slots)
            blocks = enumerate(self._slots_of_blocks)
            untrained.numbers = {block for block, slot in blocks if slot in left_out}

        return dataclasses.replace(admitted, rows=rows), leave_out

    def _blocks_here(self) -> list[Block]:
        return self._sharded.layout.blocks[self._ranks.rank]

    def _route(self, ids: Any, capacity: Sequence[int] | None) -> Any:
        routed = super()._route(ids, capacity)
        if routed.sharded is None or all(number is None for number in self._untrained):
            return routed
        groups = [
            of._replace(trained=self._trained_rows(of))
            if any(self._untrained[block] is not None for block in of.entry.slots)
            else of
            for of in routed.sharded.groups
        ]
        return routed._replace(sharded=routed.sharded._replace(groups=groups))

    def _trained_rows(self, rows: GroupRows) -> Tensor:
        """The rows of ``rows``, with -1 for those that are never trained."""
        features, entry = rows.features, rows.entry
        trained, found = features.values, []
        assert features.hotness is not None
        for block, table, count in zip(entry.slots, entry.tables, features.hotness, strict=True):
            number = self._untrained[block]
            row = _NO_ID
            if number is not None and 0 <= number - table.first_row < table.num_rows:
                row = entry.group.first_row_of(table) + number - table.first_row
            found.append(trained.new_full((count * features.batch_size,), row))
        return trained.masked_fill(trained == torch.cat(found), -1)

    def _batch_of(self, features: SparseFeatures, *, has_capacity: bool = False) -> SparseFeatures:
        batch = super()._batch_of(features, has_capacity=has_capacity)
        if not self._replaces_padding:
            return batch
        is_padding = _is_padding(batch, self._paddings, self._replaces)
        values = batch.values.masked_fill(is_padding, _IS_PADDING)
        return dataclasses.replace(batch, values=values)

    def _valid_ids(self, route: Route) -> Tensor | None:
        if all(padding is None for padding in self._block_paddings):
            return route.is_valid
        # Any integer is an id of a dynamic table, so that none can stand for padding on its way.
        is_id = ~_is_padding(route.features, self._paddings_here, self._have_padding_here)
        return is_id if route.is_valid is None else route.is_valid & is_id

    def _bag_sizes(self, batch: SparseFeatures, slot: int) -> Tensor:
        padding = self._padding[slot]
        if padding is None:
            return super()._bag_sizes(batch, slot)
        # As torch's, a mean is that of the ids that are no padding.
        counts = batch.values != (padding if self._is_dynamic[slot] else _IS_PADDING)
        size = batch.batch_size
        if batch.hotness is not None:
            lengths = [count * size for count in batch.hotness]
            of_slot = counts.split(lengths)[slot]
            of_slot = of_slot.view(size, batch.hotness[slot]).sum(1, keepdim=True)
        else:
            assert batch.offsets is not None
            before = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
            bounds = batch.offsets[slot * size : (slot + 1) * size + 1]
            of_slot = before[bounds.long()].diff().unsqueeze(1)
        return of_slot.clamp_min(1)


_NO_ID = -3
"""Stands for the padding id where there is none."""
_IS_PADDING = -2
"""Stands for ids that are padding. No rank holds such a row."""


def _is_padding(batch: SparseFeatures, paddings: Tensor, have_padding: Tensor) -> Tensor:
    """bool ``[L]``: which ids are padding, by that of each feature and by which features have one,
    both ``[F + 1]``: at last for positions in no bag."""
    values = batch.values
    paddings = paddings.to(values.dtype)
    if batch.hotness is None:
        device = values.device
        numbers = id_features(batch.offsets, [], batch.batch_size, values.numel(), device)
        return (values == paddings[numbers]) & have_padding[numbers]
    counts = [count * batch.batch_size for count in batch.hotness]
    of_ids = [
        torch.cat([one.expand(count) for one, count in zip(of.split(1), counts, strict=False)])
        for of in (paddings, have_padding)
    ]
    return (values == of_ids[0]) & of_ids[1]
