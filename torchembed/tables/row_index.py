"""Row indices: from the ids of a group's tables to rows of the group's flat weight."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.core.types import OnBadId
from torchembed.ops.linearize_ids import LinearRows, linearize_ids
from torchembed.ops.rowwise_update import RoundingKeys
from torchembed.tables.initializers import RowIds, shifted_row_key


class IndexedTable(NamedTuple):
    """One table of a group, in the words of its index."""

    key: int
    """64-bit key of the table's initial rows and of its rounding."""
    first_row: int
    """Number, in the whole table, of the first row that this rank holds."""
    num_rows: int
    """Rows that this rank holds now."""
    first_column: int
    """Number, in the whole table, of the first column that this rank holds."""
    max_rows: int | None = None
    """Rows that this rank holds once the table has grown; None: as many as now."""
    num_shares: int = 1
    """In how many parts, of which this is one, a hash divides the ids of the whole table."""


def max_rows_of(table: IndexedTable) -> int:
    """Rows that this rank holds of ``table`` once it has grown."""
    return table.num_rows if table.max_rows is None else table.max_rows


class Admission(NamedTuple):
    """The batch whose rows are admitted."""

    is_trained: Tensor | None = None
    """bool ``[1]`` on the device: False where the batch will not be trained, so that no table may
    change; None for a batch that will."""
    epoch: Tensor | None = None
    """int64 ``[1]`` on the device: how many batches were admitted to be trained so far, this one
    included. Its rows stay in their places until :meth:`RowIndex.release` of this epoch or a later
    one. None in a forward that was not prepared ahead."""
    inserts: bool = True
    """False in a module in evaluation mode, which changes no table and brings no rows anywhere."""


class NewRows(NamedTuple):
    """Rows that admission gave to ids, at most as many as the batch has ids."""

    rows: Tensor
    """int64 ``[L]``, of the group; -1 in entries that hold none."""
    ids: Tensor
    """int64 ``[L]``: the id of each row."""
    tables: Tensor
    """int32 ``[L]``: its table's number within the group."""
    num_new: Tensor | None = None
    """int64 ``[1]``: the entries at the front that hold rows; None: any may."""


class AdmittedRows(NamedTuple):
    """The rows of a batch's ids, in their places from now on."""

    rows: Tensor
    """int32 or int64 ``[L]``, -1 for ids without one."""
    new: NewRows | None = None
    """The rows whose values must be set before they are read; None for none."""


class SlotIndex(Protocol):
    """The index of a group as a sequence of slots uses it: each looks one table up."""

    def route(
        self,
        features: SparseFeatures,
        on_bad_id: OnBadId,
        rows_dtype: torch.dtype,
        is_valid: Tensor | None = None,
    ) -> LinearRows:
        """The row of each id; pure and repeatable, also on ids that nobody trains.

        Args:
            features: one for each slot, in order.
            on_bad_id: what becomes of ids that are outside their table.
            rows_dtype: int32 or int64.
            is_valid: bool ``[L]``, False where there is no id to look up, whatever the number
                there is; None: all positions of bags hold one. An index whose ids are numbers of
                rows need not ask, since what is no id is outside its rows.

        Returns:
            Rows of the group, -1 for no row; and the first position of a bad id.
        """
        ...

    def admit(
        self,
        features: SparseFeatures,
        rows: Tensor | None,
        admission: Admission,
        is_valid: Tensor | None = None,
    ) -> AdmittedRows:
        """The rows of a batch's ids, in their places from now on.

        May insert the ids of a batch that is trained, and evict others, but no row of a batch that
        was admitted and not released yet. Never waits for a GPU.

        Args:
            features, is_valid: as :meth:`route` took them.
            rows: as it gave them; None where the ids were not routed.
        """
        ...

    def tables_of_missing(
        self, features: SparseFeatures, rows: Tensor, is_valid: Tensor | None = None
    ) -> Tensor:
        """The table, its number within the group, of each id that its table has no row for; int32
        ``[L]``, -1 at all other positions and for bad ids.

        Args:
            features, is_valid: as :meth:`route` took them.
            rows: as it or :meth:`admit` gave them.
        """
        ...


class RowIndex(Protocol):
    """Turns the ids of a group's tables into rows of its flat weight; the group owns it.

    Ids reach rows in two steps: routing is pure, and may be repeated; admission changes tables, and
    comes once for each batch that is trained, after its ids were checked. It takes ids that were
    not routed, too, so that they are looked for once. Where ``changes_on_admission`` is False,
    admission changes nothing, and is left out.
    """

    changes_on_admission: bool

    def for_tables(self, tables: Sequence[int]) -> SlotIndex:
        """The index for slots that look up ``tables``, numbers within the group, one for each
        slot."""
        ...

    def release(self, epoch: Tensor, *, keeps_rows: bool = False) -> None:
        """Let the rows of batches admitted in ``epoch``, int64 ``[1]``, and before go: they were
        trained. Never waits for a GPU.

        Args:
            keeps_rows: True where they stay in their places all the same, since an optimizer that
                knows nothing of ids has state of them.
        """
        ...

    def release_prepared(self, *, keeps_rows: bool = False) -> None:
        """Let the rows of all batches go that were prepared ahead: none of them is under way any
        more. Never waits for a GPU. ``keeps_rows`` as for :meth:`release`."""
        ...

    def release_forwards(self, *, keeps_rows: bool = False) -> None:
        """Let the rows go that forwards admitted which were not prepared ahead: an update has
        trained them. Never waits for a GPU. ``keeps_rows`` as for :meth:`release`."""
        ...

    def uninitialized_rows(self) -> NewRows | None:
        """The rows that an admission gave to ids and whose values may not be set, since an
        exception ended it; None where :meth:`note_initialized` followed the last one."""
        ...

    def note_initialized(self) -> None:
        """Note that all rows that ids were given have their values."""
        ...

    def set_row_bytes(self, row_bytes: Sequence[int]) -> None:
        """Note the bytes of a row of each whole table, with its optimizer state, by which tables
        may be bounded."""
        ...

    def row_ids(self, table: int) -> RowIds:
        """For each row of a table of the group the id that its initial values and its rounding are
        functions of."""
        ...

    def rounding_keys(self) -> RoundingKeys:
        """The keys of :meth:`row_ids` as row updates take them, on the index's device."""
        ...

    def to(self, device: torch.device) -> "RowIndex":
        """An index of the same ids on another device."""
        ...

    def take_table(self, table: int, source: "RowIndex", source_table: int) -> None:
        """Take over which ids a table holds, and in which of its rows: ``table`` is its number
        here, ``source_table`` that in ``source``, the index of the same kind that held it so far.
        Its rows of the weight are copied in their order."""
        ...

    def contents(self, table: int) -> dict[str, Tensor]:
        """The ids that a table holds, their rows in it, and what is known of their use, by name;
        views. Empty where ids are the numbers of rows."""
        ...

    def load_contents(self, table: int, contents: Mapping[str, Tensor]) -> None:
        """Copy into a table what :meth:`contents` of one of as many rows gave."""
        ...


class IndexFactory(Protocol):
    """Makes the index of a new group; tables of one group have equal factories."""

    @property
    def takes_any_id(self) -> bool:
        """True where each 64-bit integer is an id; False where ids are the numbers of rows."""
        ...

    def rows_for(self, capacity: int) -> int:
        """Rows of a table that has room for ``capacity`` ids, or a few more."""
        ...

    def rows_of_part(self, num_rows: int, num_parts: int) -> int:
        """Rows of one of ``num_parts`` that ranks hold of a table of ``num_rows``, where a hash
        divides its ids."""
        ...

    @property
    def grows(self) -> bool:
        """True where tables may start with fewer rows than they hold at last."""
        ...

    def initial_rows(self, num_rows: int, of_rows: int) -> int:
        """Rows with which ``num_rows`` of a table, of its ``of_rows``, start; fewer where it
        grows."""
        ...

    def added_rows(self, num_rows: int, of_rows: int) -> int:
        """Rows that the last growth of ``num_rows`` of a table, of its ``of_rows``, adds; 0 where
        they start with all."""
        ...

    @property
    def moved_row_bytes(self) -> int:
        """Bytes that are kept of each row while it moves, beside the row and its optimizer state;
        0 where none ever does."""
        ...

    def bytes_for(self, num_rows: int) -> int:
        """Bytes of what an index keeps beside a table of ``num_rows``."""
        ...

    def __call__(self, tables: Sequence[IndexedTable], device: torch.device) -> RowIndex:
        """The index of ``tables``, whose rows follow one another in the group."""
        ...


class RangeIndex:
    """Id i of a table is its i-th row here: row ``first + i`` of the group.

    Args:
        tables: of the group, in order.
        device: where ids come.
    """

    changes_on_admission = False

    def __init__(self, tables: Sequence[IndexedTable], device: torch.device) -> None:
        self._tables, self._device = list(tables), device
        self._first_rows = [0]
        for table in tables:
            self._first_rows.append(self._first_rows[-1] + table.num_rows)

    def for_tables(self, tables: Sequence[int]) -> "RangeSlots":
        firsts = [self._first_rows[number] for number in tables]
        counts = [self._tables[number].num_rows for number in tables]
        return RangeSlots(firsts, counts, self._device)

    def release(self, epoch: Tensor, *, keeps_rows: bool = False) -> None:
        """Nothing is ever evicted."""

    def release_prepared(self, *, keeps_rows: bool = False) -> None:
        """Nothing is ever evicted."""

    def release_forwards(self, *, keeps_rows: bool = False) -> None:
        """Nothing is ever evicted."""

    def uninitialized_rows(self) -> None:
        """No rows are ever given to other ids."""

    def note_initialized(self) -> None:
        """No rows are ever given to other ids."""

    def set_row_bytes(self, row_bytes: Sequence[int]) -> None:
        """Nothing bounds a range."""

    def row_ids(self, table: int) -> range:
        held = self._tables[table]
        return range(held.first_row, held.first_row + held.num_rows)

    def rounding_keys(self) -> RoundingKeys:
        keys = [
            shifted_row_key(table.key, table.first_row - first)
            for table, first in zip(self._tables, self._first_rows, strict=False)
        ]
        columns = [table.first_column for table in self._tables]
        return RoundingKeys(
            self._int64(self._first_rows),
            self._int64(keys),
            self._int64(columns) if any(columns) else None,
        )

    def _int64(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)

    def to(self, device: torch.device) -> "RangeIndex":
        return RangeIndex(self._tables, device)

    def take_table(self, table: int, source: RowIndex, source_table: int) -> None:
        """A range of ids follows from its table."""

    def contents(self, table: int) -> dict[str, Tensor]:
        return {}

    def load_contents(self, table: int, contents: Mapping[str, Tensor]) -> None:
        """A range of ids follows from its table."""


@dataclasses.dataclass(frozen=True)
class RangeFactory:
    """Makes :class:`RangeIndex`."""

    takes_any_id = False
    grows = False
    moved_row_bytes = 0

    def rows_for(self, capacity: int) -> int:
        return capacity

    def rows_of_part(self, num_rows: int, num_parts: int) -> int:
        return -(-num_rows // num_parts)

    def initial_rows(self, num_rows: int, of_rows: int) -> int:
        """All of them: no range grows."""
        return num_rows

    def added_rows(self, num_rows: int, of_rows: int) -> int:
        """None."""
        return 0

    def bytes_for(self, num_rows: int) -> int:
        """None: a range needs a few numbers only."""
        return 0

    def __call__(self, tables: Sequence[IndexedTable], device: torch.device) -> RangeIndex:
        return RangeIndex(tables, device)


class RangeSlots:
    """Slots whose tables are ranges of the group's rows.

    Args:
        first_rows: where each slot's table begins.
        num_rows: how many rows it has.
        device: where ids come.
    """

    def __init__(
        self, first_rows: Sequence[int], num_rows: Sequence[int], device: torch.device
    ) -> None:
        self._first_and_num = list(first_rows), list(num_rows)
        self._bounds = self._bounds_on(device)

    def route(
        self,
        features: SparseFeatures,
        on_bad_id: OnBadId,
        rows_dtype: torch.dtype,
        is_valid: Tensor | None = None,
    ) -> LinearRows:
        first_rows, num_rows = self._bounds
        device = features.values.device
        if first_rows.is_meta and device.type != "meta":
            # Tables on the meta device, called with weights that others give.
            first_rows, num_rows = self._bounds_on(device)
        return linearize_ids(
            features.values,
            first_rows,
            num_rows,
            offsets=features.offsets,
            hotness=features.hotness,
            batch_size=features.batch_size,
            on_bad_id=on_bad_id,
            rows_dtype=rows_dtype,
        )

    def admit(
        self,
        features: SparseFeatures,
        rows: Tensor | None,
        admission: Admission,
        is_valid: Tensor | None = None,
    ) -> AdmittedRows:
        """``rows``: a range holds all of them already, and its ids are always routed."""
        assert rows is not None
        return AdmittedRows(rows)

    def tables_of_missing(
        self, features: SparseFeatures, rows: Tensor, is_valid: Tensor | None = None
    ) -> Tensor:
        """None: an id of a range has a row or is bad."""
        return torch.full_like(rows, -1, dtype=torch.int32)

    def _bounds_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        firsts, counts = self._first_and_num
        return (
            torch.tensor(firsts, dtype=torch.int64, device=device),
            torch.tensor(counts, dtype=torch.int64, device=device),
        )
