"""Rows of several tables in one flat tensor, and which ids have them."""

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torchembed.core.checks import FLOAT_DTYPES
from torchembed.core.features import SparseFeatures
from torchembed.core.stand_ins import KeptTensors, making_real_tensors
from torchembed.core.types import OnBadId
from torchembed.ops.initialize_rows import InitialValues, initialize_rows
from torchembed.ops.rowwise_update import RoundingKeys, UpdateRule
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
from torchembed.tables.table import Table


class IndexedRows:
    """The rows of several tables and the index from ids to them, which gives new ids their rows.

    Attributes:
        weight: ``[R, D]``, the rows of all tables, one after the other.
        index: from the tables' ids to rows of the weight.
        first_rows: where each table begins, ``[T + 1]``, on the host.
        states: optimizer state, flat like ``weight``.
        initial_state: what every element of it starts from.
        rule: by which the rows are updated; None where no optimizer of torchembed's trains them.
        num_forward_admissions: batches whose ids were admitted, and not prepared ahead.
        num_program_admissions: int64 ``[1]`` on the CPU: lookups by programs of ``torch.compile``
            in dynamic tables.
    """

    def __init__(self, tables: Sequence[Table], weight: Tensor) -> None:
        self.tables = list(tables)
        self.weight = weight
        self.first_rows = [0, *itertools.accumulate(table.num_rows for table in tables)]
        self.states: tuple[Tensor, ...] = ()
        self.initial_state = 0.0
        self.rule: UpdateRule | None = None
        self.num_forward_admissions = 0
        self.num_program_admissions = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._versions_trained: list[int] | None = None
        """Versions of parameters that no optimizer of torchembed's trains, in the last forward."""
        self.make_index()

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

    def take_contents_of_index(self, groups: Iterable["IndexedRows"]) -> None:
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


def _columns_here(table: Table) -> MissingValue:
    """The columns that are held here of the vector of ids without a row."""
    missing, first = table.spec.missing, table.first_column
    return missing if isinstance(missing, Missing) else missing[first : first + table.num_columns]
