"""The assignment of a batch's features to table groups, which are looked up in one call each."""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.core.piece_order import PieceOrder
from torchembed.core.stand_ins import KeptTensors, is_stand_in, makes_stand_ins
from torchembed.core.types import OnBadId, Pooling
from torchembed.modules.bad_ids import BadIdReport
from torchembed.modules.feature_selection import bounds_of_features, capacity_for, select_features
from torchembed.ops.linearize_ids.reference import id_features
from torchembed.ops.pooled_lookup import fixed_gradient_map
from torchembed.ops.row_gradients import GradientSink
from torchembed.ops.rowwise_update import RowGradients
from torchembed.ops.segments import Runs, find_runs
from torchembed.tables import Admission, JoinedGroup, Table, TableGroup, TableSet

_NUM_MAPS = 4
"""The most gradient maps that are kept for lookups whose form may change with every batch."""


class SlotName(NamedTuple):
    """The names of a slot in errors."""

    table: str
    feature: str
    num_rows: int


class GroupSlots:
    """The slots (uses of a table by a feature) that one group serves."""

    def __init__(
        self, group: TableGroup, slots: list[int], tables: list[Table], features: list[str]
    ) -> None:
        self.group = group
        self.slots = slots
        self.tables = tables
        self.names = [
            SlotName(table.spec.name, feature, table.num_rows)
            for table, feature in zip(tables, features, strict=True)
        ]
        self.index = group.index.for_tables([group.tables.index(table) for table in tables])
        self.changes_on_admission = group.index.changes_on_admission
        self.reorder = PieceOrder()
        self.gradient_maps: KeptTensors[Any, tuple[Tensor, Tensor]] = KeptTensors()
        """By hotness, batch size and pooling; kept, since captured steps read them."""
        self.maps_of_forward: KeptTensors[Any, tuple[Tensor, Tensor]] = KeptTensors(_NUM_MAPS)
        """Likewise, of the first forms that were looked up in forward."""


class Ids(NamedTuple):
    """The ids of some slots."""

    features: SparseFeatures
    """One for each slot."""
    is_valid: Tensor | None = None
    """bool ``[L]``, False where a position of a bag holds no id of this rank's; None: all do, or an
    id outside its table says so by itself."""


class UntrainedSlots:
    """Slots that a backward does not train, since the loss does not depend on their vectors.

    Attributes:
        numbers: of the slots; set in the backward, before gradients of rows come.
    """

    def __init__(self) -> None:
        self.numbers: set[int] = set()


class GroupRows(NamedTuple):
    """The lookups of one table group for a batch."""

    entry: GroupSlots
    features: SparseFeatures
    """A feature for each of the entry's slots; its values are rows of the group, -1 for none."""
    runs: Runs | None
    """Runs of equal rows, where they were found ahead for the optimizer's step."""
    ids: Ids | None = None
    """Kept for an index that admission changes, until then."""
    trained: Tensor | None = None
    """``[L]``: the rows as the update takes them, -1 for those that it leaves out; None where they
    are those of the features."""
    untrained: UntrainedSlots | None = None
    """Slots whose rows an update leaves out, if there may be any."""

    def gradient_map(self, pooling: Pooling, num_empty: int = 0) -> tuple[Tensor, Tensor] | None:
        """The map from positions of ``features`` to their gradients, where it was known before;
        ``num_empty`` features without ids come first."""
        features, maps = self.features, self.entry.gradient_maps
        if self.runs is None or features.hotness is None or features.weights is not None:
            return None
        hotness = (0,) * num_empty + features.hotness
        form = hotness, features.batch_size, pooling
        is_cuda = features.values.is_cuda
        if form not in maps and is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        find = functools.partial(
            fixed_gradient_map, hotness=hotness, batch_size=features.batch_size, pooling=pooling
        )
        return maps.get(form, lambda: find(features.values))

    def sink(self) -> GradientSink:
        """Takes the gradients of the rows, for the fused optimizer that updates the group.

        Raises:
            RuntimeError: where the tables have been regrouped since the rows were found.
        """
        group, tables = self.entry.group, self.entry.tables
        if any(group not in (table.group, table.group.joined) for table in tables):
            names = ", ".join(name.table for name in self.entry.names)
            raise RuntimeError(
                f"tables {names} were regrouped between prepare and forward, by an optimizer, a "
                "load or requires_grad_; prepare the batch again"
            )
        if self.trained is not None or self.untrained is not None:
            return self._record
        if isinstance(group, JoinedGroup):
            own_groups = [table.group for table in tables]
            return functools.partial(group.record_of, own_groups, runs=self.runs)
        return (
            group.record if self.runs is None else functools.partial(group.record, runs=self.runs)
        )

    def _record(self, rows: Tensor, gradients: RowGradients) -> None:
        """The sink where some of the rows are not trained."""
        entry, runs, tables = self.entry, self.runs, self.entry.tables
        rows = rows if self.trained is None else self.trained
        numbers = set[int]() if self.untrained is None else self.untrained.numbers
        left_out = [place for place, slot in enumerate(entry.slots) if slot in numbers]
        if left_out:
            rows, runs = self._without(left_out, rows), None
            tables = [table for n, table in enumerate(tables) if n not in left_out]
        if isinstance(entry.group, JoinedGroup):
            entry.group.record_of([table.group for table in tables], rows, gradients, runs)
        elif tables:
            entry.group.record(rows, gradients, runs)

    def _without(self, left_out: Sequence[int], rows: Tensor) -> Tensor:
        """``rows`` with -1 for those of some of the entry's slots."""
        features = self.features
        if features.hotness is None:
            numbers = id_features(
                features.offsets, [], features.batch_size, rows.numel(), rows.device
            )
            for number in left_out:
                rows = rows.masked_fill(numbers == number, -1)
            return rows
        pieces = list(rows.split([count * features.batch_size for count in features.hotness]))
        for number in left_out:
            pieces[number] = torch.full_like(pieces[number], -1)
        return torch.cat(pieces)


class SlotRows(NamedTuple):
    """The lookups of a module's slots for a batch: all that follows from its ids."""

    groups: list[GroupRows]
    batch_size: int
    device: torch.device


class Slots:
    """Slots of a module: slot s looks feature s of a batch up in ``tables[s]``."""

    def __init__(
        self,
        table_set: TableSet,
        tables: Sequence[Table],
        feature_names: Sequence[str],
        on_bad_id: OnBadId,
    ) -> None:
        self._table_set = table_set
        self._tables = list(tables)
        self._feature_names = list(feature_names)
        self._on_bad_id = on_bad_id
        self._known: tuple[list[TableGroup] | None, list[GroupSlots]] = None, []
        """The entries, and what they were found for: one object, since threads may look up at
        once."""
        self.bad_ids = BadIdReport()

    def by_group(self) -> list[GroupSlots]:
        """One entry for each group that serves a slot, following changes of the groups."""
        groups = self._table_set.current_groups()
        if makes_stand_ins():
            return self._entries(groups)
        known = self._known
        if known[0] is not groups:
            self._known = known = groups, self._entries(groups)
        return known[1]

    def _entries(self, groups: list[TableGroup]) -> list[GroupSlots]:
        entries = []
        for group in groups:
            slots = [s for s, t in enumerate(self._tables) if group in (t.group, t.group.joined)]
            if slots:
                tables = [self._tables[s] for s in slots]
                features = [self._feature_names[s] for s in slots]
                entries.append(GroupSlots(group, slots, tables, features))
        return entries

    def __getstate__(self) -> dict[str, object]:
        """Copies and pickles find their groups anew."""
        return {**vars(self), "_known": (None, [])}

    def route(
        self,
        batch: SparseFeatures,
        num_ids: Sequence[int] | None = None,
        is_valid: Tensor | None = None,
        *,
        has_capacity: bool = False,
    ) -> SlotRows:
        """The rows of every slot's ids, without a change of any table.

        Args:
            batch: exactly one feature for each slot, in their order.
            num_ids: of each feature, where the host knows.
            is_valid: as of :class:`Ids`; for fixed hotness. What is no id may be any number of
                its table's ids; unless bad ids are looked up as zeros, it must be one of them.
            has_capacity: as of :meth:`~torchembed.modules.collection.FeatureSlots.batch`.

        Raises:
            IndexError: for an id outside its table under ``OnBadId.RAISE``.
        """
        groups = []
        for entry in self.by_group():
            known = capacity_for(batch, entry.slots) if has_capacity else None
            if num_ids is not None:
                known = sum(num_ids[slot] for slot in entry.slots)
            features = select_features(batch, entry.slots, known, entry.reorder)
            ids = Ids(features, _selected_mask(is_valid, batch, entry))
            rows = self._routed(entry, ids)
            kept = ids if entry.changes_on_admission else None
            with_rows = dataclasses.replace(features, values=rows)
            groups.append(GroupRows(entry, with_rows, None, kept))
        return SlotRows(groups, batch.batch_size, batch.values.device)

    def _routed(self, entry: GroupSlots, ids: Ids) -> Tensor:
        """Rows of ``entry.group``, ``[L]``."""
        features = ids.features
        rows, first_bad = entry.index.route(
            features, self._on_bad_id, entry.group.rows_dtype, ids.is_valid
        )
        if self._on_bad_id is OnBadId.RAISE:
            submit_bad_id(features, first_bad, entry.names, self.bad_ids)
        # An index of ranges gives a row to what is no id but a number of one of its rows.
        return rows if ids.is_valid is None else rows.masked_fill(~ids.is_valid, -1)

    def admit(
        self, routed: SlotRows, admission: Admission | None = None, *, finds_runs: bool
    ) -> SlotRows:
        """``routed`` with its rows in the tables; once for each batch that is trained.

        Args:
            admission: of the batch; None for one that is trained and was not prepared ahead.
            finds_runs: whether to find the runs of equal rows for fused optimizers, too.
        """
        if not finds_runs and all(of_group.ids is None for of_group in routed.groups):
            return routed
        groups = []
        for group_rows in routed.groups:
            entry, features = group_rows.entry, group_rows.features
            group, ids = entry.group, group_rows.ids
            if ids is not None:
                rows = entry.index.admit(
                    ids.features, features.values, admission or Admission(), ids.is_valid
                )
                features = dataclasses.replace(features, values=rows)
                group_rows = group_rows._replace(features=features, ids=None)
            if finds_runs and group.rule is not None and entry.tables[0].parameter.requires_grad:
                trained = group_rows.trained
                runs = find_runs(features.values if trained is None else trained, group.num_rows)
                group_rows = group_rows._replace(runs=runs)
            groups.append(group_rows)
        return routed._replace(groups=groups)

    def gradient_map(
        self, features: SparseFeatures, pooling: Pooling
    ) -> tuple[Tensor, Tensor] | None:
        """:meth:`GroupRows.gradient_map` for ``features`` that :meth:`rows` was called with, where
        a fused optimizer updates their group; None where it is not worth keeping."""
        if features.hotness is None or features.weights is not None:
            return None
        (entry,) = self.by_group()
        maps, form = entry.maps_of_forward, (features.hotness, features.batch_size, pooling)
        if form not in maps:
            values = features.values
            is_capturing = values.is_cuda and torch.cuda.is_current_stream_capturing()
            is_trained = entry.group.rule is not None and torch.is_grad_enabled()
            if not is_trained or maps.is_full or is_capturing or is_stand_in(values):
                return None
        hotness, batch_size, _ = form
        find = functools.partial(
            fixed_gradient_map, hotness=hotness, batch_size=batch_size, pooling=pooling
        )
        return maps.get(form, lambda: find(features.values))

    def rows(self, features: SparseFeatures, *, is_trained: bool) -> Tensor:
        """The rows ``[L]`` of ``features``, exactly one for each slot, all of one group.

        Args:
            is_trained: whether to admit them, too.

        Raises:
            IndexError: as :meth:`route`.
        """
        (entry,) = self.by_group()
        rows = self._routed(entry, Ids(features))
        if is_trained and entry.changes_on_admission:
            rows = entry.index.admit(features, rows, Admission())
        return rows


def _selected_mask(
    is_valid: Tensor | None, batch: SparseFeatures, entry: GroupSlots
) -> Tensor | None:
    """``is_valid`` of ``batch``, of fixed hotness, at the slots of ``entry``."""
    if is_valid is None or entry.slots == list(range(len(batch.keys))):
        return is_valid
    assert batch.hotness is not None
    return entry.reorder(is_valid, [n * batch.batch_size for n in batch.hotness], entry.slots)


def submit_bad_id(
    features: SparseFeatures, first_bad: Tensor, names: Sequence[SlotName], report: BadIdReport
) -> None:
    """Have ``report`` raise where ``first_bad [1]`` is the position of an id.

    Raises:
        IndexError: naming table, feature, position among the feature's ids and value; when,
            :class:`BadIdReport` says.
    """
    batch_size, hotness = features.batch_size, features.hotness

    def describe(position: int, value: int, slot: int = 0, first: int = 0) -> str:
        if hotness is not None:
            bounds = list(itertools.accumulate((h * batch_size for h in hotness), initial=0))
            slot = bisect.bisect_right(bounds, position) - 1
            first = bounds[slot]
        name = names[slot]
        return (
            f"id out of range: table {name.table}, feature {name.feature}, position "
            f"{position - first} of the feature's ids, value {value}; ids of this table are in "
            f"[0, {name.num_rows}). Fix the data, enlarge the table, or pass "
            'on_bad_id="clamp" or "zero"'
        )

    bounds = None if hotness is not None else bounds_of_features(features)
    report.submit(features.values, first_bad, bounds, describe)
