"""Groups of tables, which hold the rows of several in one flat tensor."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torchembed.core.checks import FLOAT_DTYPES
from torchembed.core.features import SparseFeatures
from torchembed.core.own_storage import with_own_storage
from torchembed.core.stand_ins import KeptTensors, address_of, making_real_tensors
from torchembed.core.types import OnBadId
from torchembed.ops.initialize_rows import InitialValues, initialize_rows
from torchembed.ops.rowwise_update import RoundingKeys, RowGradients, UpdateRule
from torchembed.ops.segments import Runs
from torchembed.tables.gradients.pending_gradients import PendingGradients, RecordedGradients
from torchembed.tables.initial_values import initial_values
from torchembed.tables.initializers import RowIds
from torchembed.tables.missing_rows import (
    Missing,
    MissingRows,
    MissingValue,
    MissingVectors,
    missing_rows,
)
from torchembed.tables.row_index import Admission, NewRows, RowIndex, SlotIndex
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
        num_forward_admissions: batches whose ids were admitted, and not prepared ahead.
        num_program_admissions: int64 ``[1]`` on the CPU: lookups by programs of ``torch.compile``
            in dynamic tables.
        joined: the group of several modules' tables in one pass with which this one is updated;
            None where it is updated by itself.
    """

    def __init__(self, tables: Sequence[Table], weight: Tensor) -> None:
        self.tables = list(tables)
        self.weight = weight
        self.first_rows = [0, *itertools.accumulate(table.num_rows for table in tables)]
        self.states: tuple[Tensor, ...] = ()
        self.initial_state = 0.0
        self.rule: UpdateRule | None = None
        self.step = torch.zeros(1, device=weight.device)
        self.pending = PendingGradients(self)
        self.num_awaited = 0
        self.joined: JoinedGroup | None = None
        self.num_forward_admissions = 0
        self.num_program_admissions = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._versions_trained: list[int] | None = None
        """Versions of parameters that no optimizer of torchembed's trains, in the last forward."""
        self.make_index()
        self.anchor = torch.zeros(1, device="cpu", requires_grad=True)
        """``[1]``; requires a gradient, so that programs of ``torch.compile`` have a backward. With
        no elements, a sum of several gradients would be no work, and Inductor would leave out what
        computes them."""

    def make_index(self) -> None:
        """Make the index anew from the specs of the tables, without any contents."""
        indexed = [table.as_indexed() for table in self.tables]
        self._set_index(self.tables[0].spec.index(indexed, self.weight.device))

    def _set_index(self, index: RowIndex) -> None:
        self.index = index
        self._rounding_keys: RoundingKeys | None = None
        if not index.changes_on_admission:
            self._rounding_keys = index.rounding_keys()
        self._initial_values: KeptTensors[None, InitialValues] = KeptTensors()
        self._missing_rows: KeptTensors[None, MissingRows] = KeptTensors()
        self._tell_row_bytes()

    def _tell_row_bytes(self) -> None:
        """Let the index know what a row of each whole table takes, so that all ranks that hold
        columns of one find the same."""
        found = []
        for table in self.tables:
            columns = [self.weight, *(state for state in self.states if state.dim() > 1)]
            whole = [state for state in self.states if state.dim() == 1]
            row_bytes = sum(tensor.element_size() for tensor in columns) * table.spec.dim
            found.append(row_bytes + sum(state.element_size() for state in whole))
        self.index.set_row_bytes(found)

    @property
    def rounding_keys(self) -> RoundingKeys:
        """Keys of the stochastic rounding of the group's rows."""
        if self._rounding_keys is None:
            self._rounding_keys = self.index.rounding_keys()
        return self._rounding_keys

    def take_contents_of_index(self, groups: Iterable["TableGroup"]) -> None:
        """Take over from the index of each of ``groups``, which held the tables so far, the
        contents of those that are here now."""
        for group in dict.fromkeys(groups):
            for number, table in enumerate(self.tables):
                if table in group.tables:
                    self.index.take_table(number, group.index, group.tables.index(table))
        self._set_index(self.index)

    def row_ids(self, table: Table) -> RowIds:
        """For each row of ``table`` here the id that its initial values are a function of."""
        return self.index.row_ids(self.tables.index(table))

    @torch.no_grad()
    def admit(
        self,
        slots: SlotIndex,
        features: SparseFeatures,
        rows: Tensor | None,
        is_valid: Tensor | None = None,
        admission: Admission | None = None,
    ) -> Tensor:
        """The rows ``[L]`` of ids in the tables, which may change; tables that are frozen do not.
        They are of the dtype of ``rows``, or of :attr:`rows_dtype`.

        Args:
            slots: of this group's index.
            features, rows, is_valid: as for :meth:`~torchembed.tables.SlotIndex.admit`.
            admission: of the batch; None for one that is trained and was not prepared ahead.

        Raises:
            TypeError: before any change, for float64 tables.
        """
        admission = admission or Admission()
        if not self.tables[0].parameter.requires_grad or not admission.inserts:
            if rows is None:
                rows = slots.route(features, OnBadId.ZERO, self.rows_dtype, is_valid).rows
            return rows
        if self.weight.dtype not in FLOAT_DTYPES:
            names = ", ".join(table.spec.name for table in self.tables)
            raise TypeError(
                f"tables {names} must be float32, float16 or bfloat16 to give rows to new ids, got "
                f"{self.weight.dtype}; convert the module, or evaluate it"
            )
        is_in_forward = admission.epoch is None
        self.num_forward_admissions += is_in_forward
        if self.rule is None and is_in_forward:
            self._note_steps_of_others()
        is_capturing = self.weight.is_cuda and torch.cuda.is_current_stream_capturing()
        if not is_capturing:
            self._initialize_left()
        try:
            admitted = slots.admit(features, rows, admission, is_valid)
            if admitted.new is not None:
                self.initialize(admitted.new)
        except BaseException:
            # No id may keep a row with the values of another one. A graph has given no rows yet.
            if not is_capturing:
                self._initialize_left()
            self.index.note_initialized()
            raise
        self.index.note_initialized()
        return admitted.rows.to(self.rows_dtype if rows is None else rows.dtype)

    def _initialize_left(self) -> None:
        """Initialize the rows of ids whose admission an exception ended before it did."""
        new = self.index.uninitialized_rows()
        if new is not None:
            self.initialize(new)

    def release(self, epoch: Tensor) -> None:
        """Let go of the rows of batches admitted in ``epoch``, int64 ``[1]``, and before, which
        were trained; but of none where another optimizer than torchembed's keeps state of them.
        Never waits for a GPU."""
        self.index.release(epoch, keeps_rows=self.rule is None)

    def release_prepared(self) -> None:
        """Let go of the rows of batches that were prepared ahead, none of which is under way any
        more; as :meth:`release`. Never waits for a GPU."""
        self.index.release_prepared(keeps_rows=self.rule is None)

    def release_forwards(self) -> None:
        """Let go of the rows of forwards that were not prepared ahead, which an update has trained.
        Never waits for a GPU."""
        self.index.release_forwards()

    def _note_steps_of_others(self) -> None:
        """Let forwards be of another batch than those before where an optimizer that is not
        torchembed's has stepped since, as the versions of the parameters tell."""
        versions = [table.parameter._version for table in self.tables]
        if self._versions_trained not in (None, versions):
            self.index.release_forwards(keeps_rows=True)
        self._versions_trained = versions

    @torch.no_grad()
    def initialize(self, new: NewRows) -> None:
        """Give rows that the index has given to ids their initial values, and their optimizer
        state its own. Never waits for a GPU."""
        initialize_rows(
            self.weight,
            self.states,
            new.rows,
            new.ids,
            new.tables,
            self.initial_values,
            initial_state=self.initial_state,
            num_new=new.num_new,
        )

    @property
    def initial_values(self) -> InitialValues:
        """The keys and distributions that the values of new rows are functions of."""
        return self._initial_values.get(None, self._find_initial_values)

    @torch.inference_mode(mode=False)
    def _find_initial_values(self) -> InitialValues:
        return initial_values([table.as_initialized() for table in self.tables], self.device)

    @property
    def reads_missing(self) -> bool:
        """True if ids without a row of some table are looked up as other values than zeros."""
        return any(table.spec.missing is not Missing.ZEROS for table in self.tables)

    def missing_vectors(
        self,
        slots: SlotIndex,
        features: SparseFeatures,
        rows: Tensor,
        is_valid: Tensor | None = None,
    ) -> MissingVectors:
        """The vectors of ids that have no row. Never waits for a GPU.

        Args:
            slots: of this group's index.
            features, rows, is_valid: as for :meth:`~torchembed.tables.SlotIndex.tables_of_missing`.
        """
        found = self.missing_rows
        tables = slots.tables_of_missing(features, rows, is_valid)
        return found.vectors(features.values, tables)

    @property
    def missing_rows(self) -> MissingRows:
        """The values of ids without a row."""
        return self._missing_rows.get(None, self._find_missing_rows)

    def find_missing_rows(self) -> int:
        """Find :attr:`missing_rows` as real tensors, for Dynamo, which calls it while it traces,
        and for exporters; the number of tables."""
        with making_real_tensors():
            return len(self.missing_rows.constants)

    # What torch.compiler.assume_constant_result does, which would import Dynamo at once.
    find_missing_rows._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @torch.inference_mode(mode=False)
    def _find_missing_rows(self) -> MissingRows:
        return missing_rows(
            [_columns_here(table) for table in self.tables],
            self.weight.shape[1],
            self.weight.dtype,
            self.initial_values,
        )

    @property
    def stored_weight(self) -> Tensor:
        """``[R, D]``, the memory of the tables' rows, of which their parameters are views."""
        return self.weight

    @property
    def stored_states(self) -> tuple[Tensor, ...]:
        """The optimizer state of all rows of :attr:`stored_weight`."""
        return self.states

    @property
    def num_rows(self) -> int:
        return self.first_rows[-1]

    @property
    def device(self) -> torch.device:
        """The device that looks rows up and updates them."""
        return self.weight.device

    @property
    def changes_on_admission(self) -> bool:
        """True if admission changes anything, and must come once for each batch that is trained."""
        return self.index.changes_on_admission

    @property
    def rows_dtype(self) -> torch.dtype:
        """The integer type in which rows of this group are passed to operations."""
        return torch.int32 if self.num_rows < 2**31 else torch.int64

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


def _columns_here(table: Table) -> MissingValue:
    """The columns that are held here of the vector of ids without a row."""
    missing, first = table.spec.missing, table.first_column
    return missing if isinstance(missing, Missing) else missing[first : first + table.num_columns]
