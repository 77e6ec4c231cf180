"""Groups of tables, which hold the rows of several in one flat tensor."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torchembed.core.own_storage import with_own_storage
from torchembed.core.stand_ins import address_of
from torchembed.ops.rowwise_update import RowGradients, UpdateRule
from torchembed.ops.segments import Runs
from torchembed.tables.gradients.pending_gradients import PendingGradients, RecordedGradients
from torchembed.tables.indexed_rows import IndexedRows
from torchembed.tables.table import GradientReduction, Table, mark_parameter
from torchembed.tables.table_addresses import note_address

if TYPE_CHECKING:
    from torchembed.tables.joined_group import JoinedGroup


class ConvertedRows(NamedTuple):
    """The rows of a group, on another device or in another dtype."""

    weight: Tensor
    """``[R, D]``, as :attr:`TableGroup.stored_weight`."""
    device: torch.device
    """The device that looks rows up and updates them from then on."""


class TableGroup(IndexedRows):
    """Tables of one dtype and as many columns here, looked up and updated in one call.

    Parameters of the tables are views of the rows. ``states`` are made by :meth:`set_rule`.

    Attributes:
        step: float32 ``[1]``, updates done.
        pending: gradients recorded by backward and not yet applied.
        num_awaited: those that are on their way over ranks, and come once backward is done.
        joined: the group of several modules' tables in one pass with which this one is updated;
            None where it is updated by itself.
    """

    def __init__(self, tables: Sequence[Table], weight: Tensor) -> None:
        super().__init__(tables, weight)
        self.step = torch.zeros(1, device=weight.device)
        self.pending = PendingGradients(self)
        self.num_awaited = 0
        self.joined: JoinedGroup | None = None
        self.anchor = torch.zeros(1, device="cpu", requires_grad=True)
        """``[1]``; requires a gradient, so that programs of ``torch.compile`` have a backward. With
        no elements, a sum of several gradients would be no work, and Inductor would leave out what
        computes them."""

    @property
    def stored_weight(self) -> Tensor:
        """``[R, D]``, the memory of the tables' rows, of which their parameters are views."""
        return self.weight

    @property
    def stored_states(self) -> tuple[Tensor, ...]:
        """The optimizer state of all rows of :attr:`stored_weight`."""
        return self.states

    def first_row_of(self, table: Table) -> int:
        """The row of :attr:`stored_weight` at which ``table`` begins."""
        return self.first_rows[self.tables.index(table)]

    def table_rows(self, tensor: Tensor, table: Table) -> Tensor:
        """The part of ``tensor [R, ...]`` that belongs to ``table``, a view."""
        index = self.tables.index(table)
        return tensor[self.first_rows[index] : self.first_rows[index + 1]]

    def point_parameters(self) -> None:
        """Make each table's parameter a view of :attr:`stored_weight`, keeping its identity where
        it can."""
        for table in self.tables:
            rows = self.table_rows(self.stored_weight, table)
            table.parameter.data = with_own_storage(rows)
            table.group = self
            mark_parameter(table)
            note_address(table)

    def holds_parameters(self) -> bool:
        """True where every parameter still is the view of its rows that it should be."""
        weight = self.stored_weight
        return all(
            address_of(table.parameter) == address_of(self.table_rows(weight, table))
            and table.parameter.device == weight.device
            and table.parameter.dtype == weight.dtype
            for table in self.tables
            if table.num_rows
        ) and all(table.parameter.device == weight.device for table in self.tables)

    def take_rows(self, weight: Tensor, states: tuple[Tensor, ...]) -> None:
        """Go on with rows and states in other memory, of as many rows as the tables and the index
        have by now."""
        self.weight, self.states = weight, states
        self.first_rows = [0, *itertools.accumulate(table.num_rows for table in self.tables)]
        self.pending = PendingGradients(self)  # what stands for gradients has the weights' shapes
        self._set_index(self.index)
        self.point_parameters()

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
        self._tell_row_bytes()
        self.step = torch.zeros(1, device=device)

    def _leave_joined(self) -> None:
        if self.joined is not None:
            self.joined.leave(self)

    def converted(self, convert: Callable[[Tensor], Tensor]) -> ConvertedRows:
        """The group's rows on another device or in another dtype, as ``convert`` moves tensors."""
        weight = convert(self.weight)
        return ConvertedRows(weight, weight.device)

    def convert(self, rows: ConvertedRows) -> None:
        """Take ``rows``, the own ones converted, in place of these.

        State and recorded gradients follow to the device; state leaves the meta device new.
        """
        self._leave_joined()
        was_meta, (weight, device) = self.weight.is_meta, rows
        self.weight = weight
        if not was_meta:
            self.states = tuple(state.to(device) for state in self.states)
        self._settle_on(device, was_meta=was_meta)

    def _settle_on(self, device: torch.device, *, was_meta: bool) -> None:
        """Bring all that is neither rows nor their state to ``device``, the last part of
        :meth:`convert`."""
        if was_meta and self.rule is not None:
            self.set_rule(self.rule, self.initial_state)
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

    def write_back(self) -> None:
        """Bring :attr:`stored_weight` and :attr:`stored_states` up to date, where they are not what
        steps change. Waits for a GPU."""

    def forget_cached(self) -> None:
        """Note that :attr:`stored_weight` or :attr:`stored_states` were changed, after
        :meth:`write_back`."""

    @torch.no_grad()
    def fill_initial_rows(self, table: Table) -> None:
        """Give every row of ``table`` the value that the table's initializer, seed and the row's id
        define; optimizer state stays."""
        if not table.parameter.is_meta:
            self.write_back()
            row_ids = self.row_ids(table)
            if isinstance(row_ids, Tensor):
                row_ids = row_ids.to(table.parameter.device)
            table.fill_rows(table.parameter.data, row_ids)
            self.forget_cached()

    @torch.no_grad()
    def reset_states(self, table: Table) -> None:
        """Give the optimizer state of every row of ``table`` the value that it has at first."""
        for state in self.stored_states:
            self.table_rows(state, table).fill_(self.initial_state)

    def read_weight(self, rows: Tensor) -> Tensor:
        """A copy ``[n, D]`` on the CPU of ``rows``, int64 ``[n]``, of the group, wherever they are.
        Waits for a GPU, and for the disk."""
        self.write_back()
        stored = self.stored_weight.detach()
        return stored[rows.to(stored.device)].cpu()

    def check_whole(self, what: str) -> None:
        """Raise ``TypeError`` where the tables have no tensor of all their rows, for ``what`` needs
        one."""

    def take_stored_rows(self, groups: "Iterable[TableGroup]") -> None:
        """Take over the rows of the tables, and their optimizer state, that :attr:`stored_weight`
        of ``groups``, which held the tables so far, does not show."""

    def placed_runs(self, runs: Runs) -> Runs:
        """``runs`` of rows of :attr:`stored_weight`, by where ``weight`` holds these rows."""
        return runs

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
