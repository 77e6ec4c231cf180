"""Groups of separate modules whose rows lie one after the other, so that one pass updates all."""

import logging
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Sequence

import torch
from torch import Tensor

from torchembed.core.own_storage import with_own_storage
from torchembed.ops.rowwise_update import RowGradients, UpdateRule
from torchembed.ops.segments import Runs
from torchembed.tables.gradients.merged_gradients import GradientMerge
from torchembed.tables.gradients.pending_gradients import PendingGradients, RecordedGradients
from torchembed.tables.group import TableGroup
from torchembed.tables.table import Table

_logger = logging.getLogger(__name__)


class JoinedGroup(TableGroup):
    """Several groups of one table each, which one update trains as it would train each of them.

    ``weight`` and ``states`` hold the rows of all, and each group's own are parts of these. Lookups
    stay each group's own, and so do its recorded gradients; a lookup of several of the tables at
    once records its gradients here. A table that gets other memory leaves.

    Attributes:
        members: the groups. All of them were updated in the same steps, and share ``step``.
    """

    def __init__(self, members: Sequence[TableGroup], weight: Tensor) -> None:
        """
        Args:
            members: of one table each, and alike: in columns, dtype, device and kind of index.
            weight: ``[rows of all, D]``, which gets their rows.
        """
        super().__init__([group.tables[0] for group in members], weight)
        self.members = list(members)
        self._first_rows_of = dict(zip(map(id, members), self.first_rows, strict=False))
        self._merge = GradientMerge(self.rows_dtype)
        self._recorded_of: set[int] = set()
        """The members whose gradients are among ``pending``."""
        for group in self.members:
            rows = self._rows_of(weight, group)
            rows.copy_(group.weight)
            # One after the other, so that there is never a second copy of all.
            group.weight = with_own_storage(rows)
            group.point_parameters()
            group.joined = self

    def _rows_of(self, tensor: Tensor, group: TableGroup) -> Tensor:
        """The part of ``tensor [R, ...]`` that belongs to ``group``, a view."""
        first = self._first_rows_of[id(group)]
        return tensor[first : first + group.num_rows]

    def set_rule(self, rule: UpdateRule, initial_state: float) -> None:
        """:meth:`TableGroup.set_rule`, for all members."""
        super().set_rule(rule, initial_state)
        for group in self.members:
            group.rule, group.initial_state = rule, initial_state
            parts = (self._rows_of(state, group) for state in self.states)
            group.states = tuple(map(with_own_storage, parts))
            group.step = self.step

    def leave(self, group: TableGroup) -> None:
        """Let ``group`` be updated by itself from now on; its rows and state stay where they are.

        Raises:
            RuntimeError: if gradients of a lookup of several tables are pending.
        """
        self.check_nothing_pending()
        self._leave(group)

    def _leave(self, group: TableGroup) -> None:
        self.members.remove(group)
        group.joined, group.step = None, group.step.clone()

    def split(self, members: Sequence[TableGroup]) -> "JoinedGroup":
        """Let ``members`` be updated apart from the others, in one pass of their own, over the same
        memory.

        Raises:
            RuntimeError: as :meth:`leave`.
        """
        self.check_nothing_pending()
        return self._split(members)

    def _split(self, members: Sequence[TableGroup]) -> "JoinedGroup":
        made = JoinedGroup.__new__(JoinedGroup)
        vars(made).update(vars(self))
        made.members, made.step = list(members), self.step.clone()
        made.pending, made._recorded_of = PendingGradients(made), set()
        for group in members:
            self.members.remove(group)
            group.joined, group.step = made, made.step
        for joined in (self, made):
            for group in joined.members:
                group.tables[0].owner.note_change()
        return made

    def split_by(self, key: Callable[[TableGroup], Hashable]) -> None:
        """Let members of different ``key`` be updated apart from each other."""
        by_key: dict[Hashable, list[TableGroup]] = {}
        for group in self.members:
            by_key.setdefault(key(group), []).append(group)
        for members in list(by_key.values())[1:]:
            self.split(members)

    def check_nothing_pending(self) -> None:
        """Raise ``RuntimeError`` where gradients of a lookup of several tables are pending."""
        if self.pending or self.num_awaited:
            names = ", ".join(table.spec.name for table in self.tables)
            raise RuntimeError(
                f"tables {names} have gradients that no optimizer step has applied; call step() or "
                "zero_grad() before doing anything with some of them only"
            )

    def record_of(
        self,
        groups: Sequence[TableGroup],
        rows: Tensor,
        gradients: RowGradients,
        runs: Runs | None = None,
    ) -> None:
        """Keep the gradients of ``rows`` of this group, all of tables of ``groups``, until the
        optimizer's step; the sink of a lookup of several tables."""
        if not len(self.pending) and not self.num_awaited:
            self._recorded_of.clear()
        self._recorded_of.update(map(id, groups))
        reduction = groups[0].tables[0].gradient_reduction if groups else None
        if reduction is not None:
            self._await_mean(reduction, RecordedGradients(rows, gradients, runs))
        elif groups:
            self._append(rows, gradients, runs)

    def clear_pending(self) -> None:
        super().clear_pending()
        self._recorded_of.clear()
        for group in self.members:
            group.clear_pending()

    def recorded(self) -> list[RecordedGradients]:
        return [*self.pending, *(entry for group in self.members for entry in group.pending)]

    def merged_pending(self) -> RecordedGradients | None:
        """The pending gradients of all members as one entry, or None where there are none, or some
        are on their way over ranks.

        Members without any, where others have some, are updated apart from them from now on.

        Raises:
            RuntimeError: if that begins while a step is captured, whose repetition would not
                follow.
        """
        if self.num_awaited or any(group.num_awaited for group in self.members):
            return None
        of_members = [group for group in self.members if group.pending]
        updated = set(map(id, of_members))
        if len(self.pending):
            updated |= {id(g) for g in self.members if self.pending.holds(g.tables[0])}
        if not updated:
            return None
        if any(id(group) not in updated for group in self.members):
            self._keep_only(updated)
        entries = [(0, entry) for entry in self.pending]
        for group in of_members:
            first = self._first_rows_of[id(group)]
            entries += [(first, entry) for entry in group.pending]
        if len(entries) == 1 and not entries[0][0]:
            return entries[0][1]
        return self._merge(entries)

    def gathered_pending(self) -> PendingGradients:
        """The recorded gradients of all members, moved here."""
        if any(len(group.pending) for group in self.members):
            merged = self.merged_pending()
            self._recorded_of.update(id(group) for group in self.members if len(group.pending))
            for group in self.members:
                group.pending.replace([])
            self.pending.replace([] if merged is None else [merged])
        return self.pending

    def tables_of_pending(self) -> Sequence[Table]:
        return [group.tables[0] for group in self.members if id(group) in self._recorded_of]

    def _keep_only(self, updated: Container[int]) -> None:
        """Part with the members that are not ``updated``, given by identity, in this step."""
        if self.weight.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the tables that a step trains must be those of the step before while it is "
                "captured; capture after a step that trains the same tables"
            )
        others = [group for group in self.members if id(group) not in updated]
        for group in [group for group in others if group.tables[0].group is not group]:
            self._leave(group)
            others.remove(group)
        if others:
            self._split(others)


def joined_where_whole(groups: Collection[TableGroup]) -> list[TableGroup]:
    """``groups`` with joined groups in place of their members, where all of these are among them.

    Raises:
        RuntimeError: if gradients of a lookup of several tables are pending, and only some of
            these are among ``groups``.
    """
    found: dict[TableGroup, None] = {}
    for group in groups:
        joined = group.joined
        if joined is not None and all(member in groups for member in joined.members):
            found[joined] = None
        else:
            if joined is not None:
                joined.check_nothing_pending()
            found[group] = None
    return list(found)


def join_groups(groups: Iterable[TableGroup]) -> list[TableGroup]:
    """Join those of ``groups`` that one update can train, and return what is to be updated: joined
    groups, and those that stay by themselves.

    Only groups of one table that may be joined, see ``Table.may_join``, are. Rows are copied once.
    Where a GPU has no memory for that, they stay where they are.
    """
    found: list[TableGroup] = []
    alike: dict[object, list[TableGroup]] = {}
    for group in groups:
        table = group.tables[0]
        if group.joined is not None:
            group.joined.leave(group)
        is_single = len(group.tables) == 1 and table.may_join and not group.weight.is_meta
        has_whole_rows = table.sum_over_columns is None
        if is_single and has_whole_rows and not group.changes_on_admission:
            weight = group.weight
            of_ranks = table.is_sharded, table.gradient_reduction
            key = weight.shape[1], weight.dtype, weight.device, table.spec.index, of_ranks
            alike.setdefault((*key, table.parameter.requires_grad), []).append(group)
        else:
            found.append(group)
    for members in alike.values():
        weight = None if len(members) == 1 else _weight_for(members)
        found += members if weight is None else [JoinedGroup(members, weight)]
    return found


def _weight_for(members: Sequence[TableGroup]) -> Tensor | None:
    """Memory for the rows of all ``members``; None where a GPU has none."""
    like, num_rows = members[0].weight, sum(group.num_rows for group in members)
    try:
        return like.new_empty(num_rows, like.shape[1])
    except torch.OutOfMemoryError:
        _logger.info(
            "%d tables of separate modules are updated one by one: the GPU has no memory to put "
            "their %d rows side by side",
            len(members),
            num_rows,
        )
        return None
