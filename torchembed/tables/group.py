"""Tables, and the groups that hold the rows of several in one flat tensor."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from torchembed.core.left_behind import LeftBehind
from torchembed.core.own_storage import with_own_storage
from torchembed.core.random_bits import name_key
from torchembed.core.stand_ins import address_of
from torchembed.ops.rowwise_update import RowGradients, UpdateRule
from torchembed.ops.segments import Runs
from torchembed.tables.initializers import Initializer, RowIds, Uniform
from torchembed.tables.pending_gradients import PendingGradients, RecordedGradients
from torchembed.tables.row_index import IndexedTable, IndexFactory, RangeFactory, RowIndex
from torchembed.tables.table_addresses import note_address

if TYPE_CHECKING:
    from torchembed.tables.joined_group import JoinedGroup


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableSpec:
    """A whole table, wherever its rows are."""

    name: str
    num_rows: int
    dim: int
    dtype: torch.dtype = torch.float32
    initializer: Initializer = Uniform()
    seed: int = 0
    index: IndexFactory = RangeFactory()
    """Makes the index of the groups that hold the table."""

    @property
    def num_ids(self) -> int | None:
        """Ids of the table are in ``[0, num_ids)``; None: every 64-bit integer is one."""
        return None if self.index.takes_any_id else self.num_rows

    @property
    def key(self) -> int:
        """64-bit key of the table's initial rows and of its rounding."""
        return name_key(self.seed, self.name)


ColumnSum = Callable[[Tensor], Tensor]
"""The sum of the ranks' ``[runs]``, one number for each run of equal rows; the ranks that hold the
table's columns call it at the same step. They may have different capacities of spare runs; what
comes back has the least of them."""


RankMaximum = Callable[[Tensor], None]
"""Makes a number the greatest of those on the ranks that hold tables of a model, in place; these
ranks call it at the same step. No GPU is waited for."""


GradientReduction = Callable[
    ["RecordedGradients", Tensor, Callable[[Tensor, RowGradients], None]], None
]
"""Takes recorded gradients, the ``weight [R, D]``, and what is called at the end of the backward
with ``(rows, gradients)`` that are equal on all ranks."""


def _as_it_is(rows: Tensor) -> Tensor:
    return rows


class TableOwner(Protocol):
    """Sorts tables into groups."""

    def form_groups(self) -> None:
        """Bring the groups in line with the tables' parameters and update keys."""
        ...

    def current_groups(self) -> "list[TableGroup]":
        """The groups, brought in line where a parameter was frozen or given other rows."""
        ...

    def note_change(self) -> None:
        """Note that a group is updated together with other ones than before."""
        ...


class WeightHolder(Protocol):
    """A module under whose attribute ``weight`` users see a table."""

    _parameters: dict[str, nn.Parameter | None]

    def held_weight(self) -> Tensor:
        """The value of ``weight`` now."""
        ...


class Table:
    """The part of a table that one device holds: rows ``[first_row, first_row + num_rows)``, and of
    these the columns ``[first_column, first_column + num_columns)``; in one group.

    ``parameter`` is ``[num_rows, num_columns]``, part of the memory of the group's weight under a
    storage of its own: what ``state_dict``, any ``torch.optim`` optimizer and other libraries see.
    ``spec`` is of the whole table.
    """

    def __init__(
        self,
        spec: TableSpec,
        *,
        first_row: int = 0,
        num_rows: int | None = None,
        first_column: int = 0,
        num_columns: int | None = None,
    ) -> None:
        self.spec = spec
        self.first_row = first_row
        self.num_rows = spec.num_rows - first_row if num_rows is None else num_rows
        self.first_column = first_column
        self.num_columns = spec.dim - first_column if num_columns is None else num_columns
        self.parameter: nn.Parameter
        self.group: TableGroup
        self.owner: TableOwner
        self.update_key: Hashable = None
        """Key of the optimizer and parameter group that update the table; None: weight.grad
        appears."""
        self.is_sharded = False
        """True where this rank holds rows that not every rank holds."""
        self.as_global: Callable[[Tensor], Tensor] = _as_it_is
        """Turns this table's rows, or their optimizer state, into what a distributed checkpoint
        takes."""
        self.sum_over_columns: ColumnSum | None = None
        """For a table whose columns are on several ranks."""
        self.max_over_holders: RankMaximum | None = None
        """For a table of a model whose ranks hold different ones; the same for all of its tables.
        """
        self.gradient_reduction: GradientReduction | None = None
        """For a table that every rank holds: makes recorded gradients their mean over ranks."""
        self.may_join = False
        """True for the table of a module that holds no other: tables of several such modules may be
        updated in one pass."""
        self.holder: WeightHolder | None = None
        """The module whose ``weight`` is ``parameter``; None for a parameter of no module."""

    def holds_parameter(self) -> bool:
        """False where the module holds another tensor in place of the parameter, as
        ``torch.func.functional_call``, a parametrization and pruning put it there."""
        holder = self.holder
        return holder is None or holder._parameters.get("weight") is self.parameter

    def held_weight(self) -> Tensor:
        """The rows that lookups read: ``parameter``, or what the module holds in its place."""
        if self.holder is None or self.holds_parameter():
            return self.parameter
        return self.holder.held_weight()

    def __getstate__(self) -> dict[str, object]:
        """Copies and pickles hold no rows and have no optimizer; their module sees to the rows."""
        left_out = ("parameter", "group", "owner")
        state = {name: value for name, value in vars(self).items() if name not in left_out}
        return {**state, "update_key": None, "holder": None}


class TableGroup:
    """Tables of one dtype and as many columns here, looked up and updated in one call.

    Attributes:
        weight: ``[R, D]``, the rows of all tables, one after the other. The tables' parameters are
            views of it.
        index: from the tables' ids to rows of the weight.
        first_rows: where each table begins, ``[T + 1]``, on the host.
        states: optimizer state, flat like ``weight``; made by :meth:`set_rule`.
        initial_state: what every element of it starts from.
        step: float32 ``[1]``, updates done.
        pending: gradients recorded by backward and not yet applied.
        num_awaited: those that are on their way over ranks, and come once backward is done.
        joined: the group of several modules' tables in one pass with which this one is updated;
            None where it is updated by itself.
    """

    def __init__(self, tables: Sequence[Table], weight: Tensor) -> None:
        self.tables = list(tables)
        self.weight = weight
        self.first_rows = [0]
        for table in tables:
            self.first_rows.append(self.first_rows[-1] + table.num_rows)
        self.states: tuple[Tensor, ...] = ()
        self.initial_state = 0.0
        self.rule: UpdateRule | None = None
        self.step = torch.zeros(1, device=weight.device)
        self.pending = PendingGradients(self)
        self.num_awaited = 0
        self.joined: JoinedGroup | None = None
        self.make_index()
        self.anchor = torch.zeros(0, device="cpu", requires_grad=True)
        """``[0]``; requires a gradient, so that programs of ``torch.compile`` have a backward."""

    def make_index(self) -> None:
        """Make the index anew from the specs of the tables, without any contents."""
        indexed = [
            IndexedTable(t.spec.key, t.first_row, t.num_rows, t.first_column) for t in self.tables
        ]
        self._set_index(self.tables[0].spec.index(indexed, self.weight.device))

    def _set_index(self, index: RowIndex) -> None:
        self.index = index
        self.rounding_keys = index.rounding_keys()

    def take_contents_of_index(self, groups: Iterable["TableGroup"]) -> None:
        """Take over from the index of each of ``groups``, which held the tables so far, the
        contents of those that are here now."""
        for group in dict.fromkeys(groups):
            for number, table in enumerate(self.tables):
                if table in group.tables:
                    self.index.take_table(number, group.index, group.tables.index(table))
        self.rounding_keys = self.index.rounding_keys()

    def row_ids(self, table: Table) -> RowIds:
        """For each row of ``table`` here the id that its initial values are a function of."""
        return self.index.row_ids(self.tables.index(table))

    @property
    def num_rows(self) -> int:
        return self.weight.shape[0]

    @property
    def rows_dtype(self) -> torch.dtype:
        """The integer type in which rows of this group are passed to operations."""
        return torch.int32 if self.num_rows < 2**31 else torch.int64

    def first_row_of(self, table: Table) -> int:
        """The row of ``weight`` at which ``table`` begins."""
        return self.first_rows[self.tables.index(table)]

    def table_rows(self, tensor: Tensor, table: Table) -> Tensor:
        """The part of ``tensor [R, ...]`` that belongs to ``table``, a view."""
        index = self.tables.index(table)
        return tensor[self.first_rows[index] : self.first_rows[index + 1]]

    def point_parameters(self) -> None:
        """Make each table's parameter a view of ``weight``, keeping its identity where it can."""
        for table in self.tables:
            rows = self.table_rows(self.weight, table)
            table.parameter.data = with_own_storage(rows)
            table.group = self
            mark_parameter(table)
            note_address(table)

    def holds_parameters(self) -> bool:
        """True where every parameter still is the view of ``weight`` that it should be."""
        return all(
            address_of(table.parameter) == address_of(self.table_rows(self.weight, table))
            and table.parameter.device == self.weight.device
            and table.parameter.dtype == self.weight.dtype
            for table in self.tables
            if table.num_rows
        ) and all(table.parameter.device == self.weight.device for table in self.tables)

    def set_rule(self, rule: UpdateRule, initial_state: float) -> None:
        """Let ``rule`` update the rows: makes the state (all ``initial_state``, no step done), and
        from now on backward records gradients in ``pending`` instead of giving the parameters one.
        """
        self._leave_joined()
        self.rule, self.initial_state = rule, initial_state
        shape, device = rule.state_shape(*self.weight.shape), self.weight.device
        self.states = tuple(
            torch.full(shape, initial_state, device=device) for _ in range(rule.num_states)
        )
        self.step = torch.zeros(1, device=device)

    def _leave_joined(self) -> None:
        if self.joined is not None:
            self.joined.leave(self)

    def convert(self, weight: Tensor) -> None:
        """Take ``weight [R, D]``, the own one on another device or in another dtype, in its place.

        State and recorded gradients follow to its device; state leaves the meta device new.
        """
        self._leave_joined()
        was_meta, device = self.weight.is_meta, weight.device
        self.weight = weight
        if was_meta and self.rule is not None:
            self.set_rule(self.rule, self.initial_state)
        self.states = tuple(state.to(device) for state in self.states)
        self.step = torch.zeros(1, device=device) if was_meta else self.step.to(device)
        self.pending.to(device)
        self._set_index(self.index.to(device))
        self.point_parameters()

    def record(self, rows: Tensor, gradients: RowGradients, runs: Runs | None = None) -> None:
        """Keep the gradients of ``rows`` until the optimizer's step; the sink of a lookup.

        ``runs`` of equal rows, where they are known, spare the step finding them.
        """
        if self.tables[0].group is not self:
            names = ", ".join(table.spec.name for table in self.tables)
            raise RuntimeError(
                f"tables {names} were regrouped between forward and backward, by an optimizer, a "
                "load or requires_grad_; do that before forward"
            )
        reduction = self.tables[0].gradient_reduction
        if reduction is None:
            self._append(rows, gradients, runs)
        else:
            self._await_mean(reduction, RecordedGradients(rows, gradients, runs))

    def _await_mean(self, reduction: GradientReduction, recorded: RecordedGradients) -> None:
        """Keep the mean over ranks of gradients, once backward is done."""
        self.num_awaited += 1
        reduction(recorded, self.weight, self._take_awaited)

    def _take_awaited(self, rows: Tensor, gradients: RowGradients) -> None:
        if self.num_awaited:  # none are wanted any more after discard
            self.num_awaited -= 1
            self._append(rows, gradients, None)

    def _append(self, rows: Tensor, gradients: RowGradients, runs: Runs | None) -> None:
        ready = None
        if rows.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        self.pending.append(RecordedGradients(rows, gradients, runs, ready))

    def discard(self) -> None:
        """Forget all gradients recorded so far, those that are awaited too."""
        self.clear_pending()
        self.num_awaited = 0

    def clear_pending(self) -> None:
        """Forget the gradients that were recorded, but not those that are awaited."""
        self.pending.clear()

    def recorded(self) -> list[RecordedGradients]:
        """The gradients that the group's next update applies."""
        return list(self.pending)

    def merged_pending(self) -> RecordedGradients | None:
        """The gradients of the group's next update as one entry, or None where there are none."""
        return self.pending.merged()

    def gathered_pending(self) -> PendingGradients:
        """The gradients of the group's next update, all in one place."""
        return self.pending

    def tables_of_pending(self) -> Sequence[Table]:
        """The tables that ``pending`` may hold gradients of."""
        return self.tables


class _TableMark(LeftBehind):
    """Attached to the parameter of a table."""

    def __init__(self, table: Table) -> None:
        self.table = table


def mark_parameter(table: Table) -> None:
    """Let :func:`table_of` find ``table`` by its parameter."""
    table.parameter.torchembed_table = _TableMark(table)  # type: ignore[attr-defined]


def table_of(parameter: Tensor) -> Table | None:
    """The table whose rows ``parameter`` is, or None for any other tensor."""
    mark = getattr(parameter, "torchembed_table", None)
    return mark.table if isinstance(mark, _TableMark) else None
