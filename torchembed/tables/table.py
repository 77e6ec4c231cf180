"""Tables: the rows of one, or a part of them, and what belongs to them."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from torchembed.core.left_behind import LeftBehind
from torchembed.core.random_bits import name_key
from torchembed.ops.rowwise_update import RowGradients
from torchembed.tables.initial_values import InitializedTable
from torchembed.tables.initializers import Initializer, RowIds, Uniform
from torchembed.tables.missing_rows import Missing, MissingValue
from torchembed.tables.row_index import IndexedTable, IndexFactory, RangeFactory
from torchembed.tables.storage import Storage
from torchembed.tables.table_addresses import number_for

if TYPE_CHECKING:
    from torchembed.tables.gradients.pending_gradients import RecordedGradients
    from torchembed.tables.group import TableGroup


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
    missing: MissingValue = Missing.ZEROS
    """The vector of an id without a row, of ``dim`` numbers where it is one."""
    storage: Storage | None = None
    """The home of the rows; None: the device."""

    zero_row: int | None = None
    """The row that is all zeros at first, of a table whose ids are numbers of rows; None: none."""

    @property
    def num_ids(self) -> int | None:
        """Ids of the table are in ``[0, num_ids)``; None: every 64-bit integer is one."""
        return None if self.index.takes_any_id else self.num_rows

    @property
    def key(self) -> int:
        """64-bit key of the table's initial rows and of its rounding."""
        return name_key(self.seed, self.name)


class IdShare(NamedTuple):
    """The ids of a dynamic table that one rank holds: those that a hash gives to one of several
    shares."""

    place: int
    """From 0 on."""
    num_shares: int


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
        """Note that a group is updated together with other ones than before, or that its ids have
        other rows."""
        ...

    def note_growth(self) -> None:
        """Note that tables of groups have more rows, in other memory."""
        ...


class WeightHolder(Protocol):
    """A module under whose attribute ``weight`` users see a table."""

    _parameters: dict[str, nn.Parameter | None]

    def held_weight(self) -> Tensor:
        """The value of ``weight`` now."""
        ...


class Table:
    """The part of a table that one device holds: rows ``[first_row, first_row + num_rows)``, and of
    these the columns ``[first_column, first_column + num_columns)``; in one group. A dynamic table
    may start with fewer rows than it holds at last.

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
        self.max_rows = spec.num_rows - first_row if num_rows is None else num_rows
        """Rows once the table has grown."""
        self.num_rows = spec.index.initial_rows(self.max_rows, spec.num_rows)
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
        self.contents_as_global: Callable[[Tensor], Tensor] = _as_it_is
        """Does the same for each tensor of :meth:`index_contents`."""
        self.id_share = IdShare(0, 1)
        """The share of a dynamic table's ids that this rank holds."""
        self.sum_over_columns: ColumnSum | None = None
        """Adds over columns, of a table whose columns are on several ranks."""
        self.max_over_holders: RankMaximum | None = None
        """Takes maxima over ranks, for a model whose ranks hold different tables; one for all."""
        self.gradient_reduction: GradientReduction | None = None
        """Makes recorded gradients their mean over ranks, of a table that every rank holds."""
        self.may_join = False
        """True for the table of a module that holds no other: tables of several such modules may be
        updated in one pass."""
        self.holder: WeightHolder | None = None
        """The module whose ``weight`` is ``parameter``; None for a parameter of no module."""
        self.shown_states: list[Tensor] = []
        """The views of the table's state that an optimizer shows; they follow where it grows."""
        self.kept_contents: dict[str, Tensor] | None = None
        """The :meth:`index_contents` of the table that this one was copied from, while it has no
        group yet."""
        self.cache_device: torch.device | None = None
        """The device of the cache of a table whose rows live elsewhere; None: the rows' own."""
        self.number = number_for(self)
        """For programs of ``torch.compile``."""

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

    def index_contents(self) -> dict[str, Tensor]:
        """The ids that the table holds, their rows in it, and what is known of their use, by name;
        views. Empty where ids are the numbers of rows."""
        if not hasattr(self, "group"):  # of a copy, before its module has formed groups
            return self.kept_contents or {}
        return self.group.index.contents(self.group.tables.index(self))

    def as_initialized(self) -> InitializedTable:
        """The table in the words of what its new rows get."""
        spec = self.spec
        return InitializedTable(spec.key, spec.initializer, spec.num_rows, self.first_column)

    def as_indexed(self) -> IndexedTable:
        """The table in the words of an index."""
        return IndexedTable(
            self.spec.key,
            self.first_row,
            self.num_rows,
            self.first_column,
            self.max_rows,
            self.id_share.num_shares,
        )

    def fill_initial_rows(self) -> None:
        """Give every row the value that the table's initializer, seed and the row's id define."""
        self.group.fill_initial_rows(self)

    def check_whole(self, what: str) -> None:
        """:meth:`TableGroup.check_whole`, of the table's group."""
        if hasattr(self, "group"):
            self.group.check_whole(what)

    def fill_rows(self, rows: Tensor, row_ids: RowIds) -> None:
        """Give ``rows [n, D]``, of the columns that are here, the values that the rows of
        ``row_ids`` have at first."""
        spec = self.spec
        spec.initializer.fill(rows, spec.key, row_ids, self.first_column, spec.num_rows)
        if spec.zero_row is None:
            return
        if isinstance(row_ids, Tensor):
            rows.masked_fill_((row_ids == spec.zero_row).unsqueeze(1), 0.0)
        elif spec.zero_row in row_ids:
            rows[spec.zero_row - row_ids.start].zero_()

    def reseed(self, seed: int) -> None:
        """Let initial rows from now on, and the rounding of rows, follow from ``seed``."""
        if seed == self.spec.seed:
            return
        self.spec = dataclasses.replace(self.spec, seed=seed)
        for group in (self.group, self.group.joined):
            if group is not None:
                group.make_index()
        self.owner.note_change()

    def holds_ids(self) -> bool:
        """True if ids were inserted into a dynamic table; waits for its device."""
        digests = self.index_contents().get("digests")
        return digests is not None and not digests.is_meta and bool(digests.any())

    def write_back(self) -> None:
        """:meth:`TableGroup.write_back`, of the table's group."""
        if hasattr(self, "group"):  # not of a copy, before its module has formed groups
            self.group.write_back()

    def forget_cached(self) -> None:
        """:meth:`TableGroup.forget_cached`, likewise."""
        if hasattr(self, "group"):
            self.group.forget_cached()

    def load_index_contents(self, contents: Mapping[str, Tensor]) -> None:
        """Copy what :meth:`index_contents` of a table of as many rows gave."""
        if not hasattr(self, "group"):
            self.kept_contents = {name: tensor.clone() for name, tensor in contents.items()}
            return
        self.group.index.load_contents(self.group.tables.index(self), contents)
        self.note_moved_ids()

    def note_moved_ids(self) -> None:
        """Note that ids of a dynamic table have other rows than batches know that a pipeline has
        prepared."""
        self.owner.note_change()

    def __getstate__(self) -> dict[str, object]:
        """Copies and pickles hold no rows and have no optimizer; their module sees to the rows."""
        left_out = ("parameter", "group", "owner", "number", "shown_states")
        state = {name: value for name, value in vars(self).items() if name not in left_out}
        kept = {name: tensor.clone() for name, tensor in self.index_contents().items()}
        cleared = {"update_key": None, "holder": None, "shown_states": []}
        return {**state, **cleared, "kept_contents": kept or None}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self.number = number_for(self)


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


def check_own_rows(table: Table | None, parameter: Tensor) -> None:
    """Check that ``parameter`` may become the rows of ``table``.

    Raises:
        ValueError: if it is that of another table, and one of both is dynamic: each would give
            the same rows to its own ids.
    """
    other = table_of(parameter)
    if table is None or other is None or other is table:
        return
    if table.spec.num_ids is None or other.spec.num_ids is None:
        raise ValueError(
            f"weight of table {table.spec.name} must not be that of another table, got the one of "
            f"table {other.spec.name}: dynamic tables give rows to ids of their own, so that they "
            "cannot be tied; call one module for both, or name both features in feature_names of "
            "one table of a collection"
        )
