"""The assignment of a batch's features to table groups, which are looked up in one call each."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.core.stand_ins import is_stand_in, makes_stand_ins
from torchembed.core.types import OnBadId, Pooling
from torchembed.modules.lookup.awaited_admission import awaits_admission
from torchembed.modules.lookup.bad_ids import BadIdReport
from torchembed.modules.lookup.bad_ids_of_slots import submit_bad_id
from torchembed.modules.lookup.feature_selection import capacity_for, select_features
from torchembed.modules.lookup.fetched_rows import fetch_refused, fetch_rows
from torchembed.modules.lookup.group_rows import GroupRows, GroupSlots, Ids
from torchembed.ops.pooled_lookup import fixed_gradient_map
from torchembed.ops.segments import find_runs
from torchembed.tables import (
    Admission,
    FetchedRows,
    MissingVectors,
    Table,
    TableGroup,
    TableSet,
    TieredGroup,
)


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
        """The rows of every slot's ids, without a change of any table; those that admission
        changes are left to it where it is awaited.

        Args:
            batch: exactly one feature for each slot, in their order.
            num_ids: of each feature, where the host knows.
            is_valid: as of :class:`Ids`. What is no id may be any number of its table's ids; unless
                bad ids are looked up as zeros, it must be one of them.
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
            ids = Ids(features, _selected_mask(is_valid, batch, entry, known))
            kept = ids if entry.changes_on_admission else None
            awaits_rows = entry.admission_finds_rows and awaits_admission()
            with_rows = features
            if awaits_rows:
                self._submit_none_bad(entry, features)
            else:
                with_rows = dataclasses.replace(features, values=self._routed(entry, ids))
            looked_up = ids if entry.reads_missing else None
            groups.append(
                GroupRows(entry, with_rows, None, kept, awaits_rows, missing_ids=looked_up)
            )
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

    def _submit_none_bad(self, entry: GroupSlots, features: SparseFeatures) -> None:
        """Submit the check of :meth:`_routed` for ids none of which is bad, since ranks reduce
        their checks together."""
        if self._on_bad_id is OnBadId.RAISE:
            values = features.values
            none = torch.full((1,), values.numel(), dtype=torch.int64, device=values.device)
            submit_bad_id(features, none, entry.names, self.bad_ids)

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
                known = None if group_rows.awaits_rows else features.values
                rows = group.admit(entry.index, ids.features, known, ids.is_valid, admission)
                features = dataclasses.replace(features, values=rows)
                group_rows = group_rows._replace(features=features, ids=None, awaits_rows=False)
            if finds_runs and group.rule is not None and entry.tables[0].parameter.requires_grad:
                trained = group_rows.trained
                runs = find_runs(features.values if trained is None else trained, group.num_rows)
                group_rows = group_rows._replace(runs=runs)
            if isinstance(group, TieredGroup):
                known = group_rows.runs if group_rows.trained is None else None
                fetched = fetch_rows(group, features.values, known, admission, self.bad_ids)
                group_rows = group_rows._replace(fetched=fetched)
            groups.append(group_rows)
        return routed._replace(groups=groups)

    def fetch_refused(self, admitted: SlotRows) -> None:
        """Bring rows to the device that found no place there when they were admitted, ahead of the
        step; before they are looked up."""
        for group_rows in admitted.groups:
            group = group_rows.entry.group
            if isinstance(group, TieredGroup) and group_rows.fetched is not None:
                fetch_refused(group, group_rows.fetched, self.bad_ids)

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

    def rows(
        self,
        features: SparseFeatures,
        admission: Admission | None,
        is_valid: Tensor | None = None,
    ) -> Tensor:
        """The rows ``[L]`` of ``features``, exactly one for each slot, all of one group.

        Args:
            admission: the batch as which to admit them, too; None to leave tables as they are.
            is_valid: as of :class:`Ids`.

        Raises:
            IndexError: as :meth:`route`.
        """
        (entry,) = self.by_group()
        if admission is not None and entry.admission_finds_rows:
            self._submit_none_bad(entry, features)
            return entry.group.admit(entry.index, features, None, is_valid, admission)
        rows = self._routed(entry, Ids(features, is_valid))
        if admission is not None and entry.changes_on_admission:
            rows = entry.group.admit(entry.index, features, rows, is_valid, admission)
        return rows

    def fetch(self, rows: Tensor, admission: Admission) -> FetchedRows | None:
        """Bring ``rows [L]``, as :meth:`rows` gave them, to the device as those of the batch of
        ``admission``; None where nothing trains them there.

        Raises:
            RuntimeError: where they find no place.
        """
        (entry,) = self.by_group()
        assert isinstance(entry.group, TieredGroup)
        return fetch_rows(entry.group, rows, None, admission, self.bad_ids)

    def missing(
        self, features: SparseFeatures, rows: Tensor, is_valid: Tensor | None = None
    ) -> MissingVectors:
        """The vectors of ids that have no row.

        Args:
            features, is_valid: as for :meth:`rows`.
            rows: as it gave them.
        """
        (entry,) = self.by_group()
        return entry.group.missing_vectors(entry.index, features, rows, is_valid)


def _selected_mask(
    is_valid: Tensor | None, batch: SparseFeatures, entry: GroupSlots, num_ids: int | None
) -> Tensor | None:
    """``is_valid`` of ``batch`` at the slots of ``entry``, which have ``num_ids``; None where the
    host does not know."""
    if is_valid is None or entry.slots == list(range(len(batch.keys))):
        return is_valid
    if batch.hotness is None:
        mask = dataclasses.replace(batch, values=is_valid.int(), weights=None)
        return select_features(mask, entry.slots, num_ids).values > 0
    return entry.reorder(is_valid, [n * batch.batch_size for n in batch.hotness], entry.slots)
