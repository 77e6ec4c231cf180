"""The gradients of a table group that backward has recorded and no step has applied."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from torchembed.core.stand_ins import is_stand_in
from torchembed.core.trees import map_tensors
from torchembed.ops.row_gradients import WeightGradient, summed_gradients, table_gradient
from torchembed.ops.rowwise_update import RowGradients
from torchembed.ops.segments import Runs, find_runs
from torchembed.tables.gradients.table_gradient import TableGradient

if TYPE_CHECKING:
    from torchembed.tables.group import TableGroup
    from torchembed.tables.table import Table


class RecordedGradients(NamedTuple):
    """Gradients of rows, as a backward gave them."""

    rows: Tensor
    gradients: RowGradients
    known_runs: Runs | None = None
    """Runs of equal ``rows``, where they were found before."""
    ready: torch.cuda.Event | None = None
    """The moment from which another stream of the GPU may use them."""

    def wait(self) -> None:
        """Let the current stream wait until they are there."""
        if self.ready is not None:
            torch.cuda.current_stream(self.rows.device).wait_event(self.ready)

    def runs(self, num_rows: int) -> Runs:
        """The runs of equal rows, of a group of ``num_rows``."""
        return find_runs(self.rows, num_rows) if self.known_runs is None else self.known_runs


class _Shown(NamedTuple):
    """A table whose gradients are seen as ``weight.grad``."""

    table: "Table"
    parameter: nn.Parameter
    gradient: TableGradient


class PendingGradients:
    """Recorded gradients of a group's rows, oldest first.

    While there are some, ``weight.grad`` of each table is a :class:`TableGradient`. Where somebody
    takes it away, as ``nn.Module.zero_grad`` of a module around the table does, those of the table
    are forgotten.

    Args:
        group: the group.
    """

    def __init__(self, group: "TableGroup") -> None:
        self._group = group
        self._entries: list[RecordedGradients] = []
        self._shown: list[_Shown] = []
        self._kept: dict[Table, TableGradient] = {}
        """One for each table, so that a backward makes none."""
        self._sums: tuple[RecordedGradients, Runs, Tensor] | None = None
        """All gradients as one entry, its runs and their sums; None where they are not known."""

    def __len__(self) -> int:
        return len(self._current())

    def __iter__(self) -> Iterator[RecordedGradients]:
        return iter(list(self._current()))

    def _current(self) -> list[RecordedGradients]:
        """The entries, without the gradients of tables whose ``weight.grad`` was taken away."""
        if self._entries:
            gone = [s for s in self._shown if s.parameter.grad is not s.gradient]
            if gone:
                self._shown = [s for s in self._shown if s.parameter.grad is s.gradient]
                for shown in gone:
                    self._forget(shown.table)
                if not self._shown:
                    self._set([])
        return self._entries

    def _set(self, entries: list[RecordedGradients]) -> None:
        self._entries, self._sums = entries, None

    def holds(self, table: "Table") -> bool:
        """True if there are gradients that ``weight.grad`` of ``table`` stands for."""
        return len(self) > 0 and any(shown.table is table for shown in self._shown)

    def append(self, entry: RecordedGradients) -> None:
        """Record ``entry``, and let the tables' parameters show it."""
        self.replace([*self._current(), entry])

    def replace(self, entries: list[RecordedGradients]) -> None:
        """Let ``entries`` be all."""
        if not self._entries:
            self._shown = []  # of gradients that are gone
        self._set(entries)
        self.show()

    def show(self) -> None:
        """Make ``weight.grad`` of the tables, where it is None, stand for the gradients."""
        if not self._entries or is_stand_in(self._entries[-1].rows):
            return
        tables = self._group.tables_of_pending()
        if len(self._shown) == len(tables):
            return
        shown = {s.table for s in self._shown}
        for table in tables:
            parameter = table.parameter
            if table in shown or is_stand_in(parameter):
                continue
            gradient = table.group.pending.gradient_of(table)
            if parameter.grad is None:
                parameter.grad = gradient
            if parameter.grad is gradient:
                self._shown.append(_Shown(table, parameter, gradient))

    def gradient_of(self, table: "Table") -> TableGradient:
        """The tensor that stands for the gradients of ``table``, which is of this group; always the
        same tensor while its weight keeps device and dtype."""
        kept, weight = self._kept.get(table), self._group.weight
        if kept is None or kept.dtype is not weight.dtype or kept.device != weight.device:
            kept = self._kept[table] = TableGradient(table)
        return kept

    def hide(self) -> None:
        """Take ``weight.grad`` away and keep the gradients, until :meth:`show`."""
        if self._current():
            for shown in self._shown:
                shown.parameter.grad = None
            self._shown = []

    def clear(self) -> None:
        """Forget all of them."""
        self._set([])
        for shown in self._shown:
            if shown.parameter.grad is shown.gradient:
                shown.parameter.grad = None
        self._shown = []

    def to(self, device: torch.device) -> None:
        """Move them."""
        self._set([map_tensors(lambda tensor: tensor.to(device), e) for e in self._entries])

    def merged(self) -> RecordedGradients | None:
        """All of them as one entry, or None where there are none."""
        entries = self._current()
        if len(entries) <= 1:
            return entries[0] if entries else None
        rows, gradient_rows, scales, first = [], [], [], 0
        for entry in entries:
            entry.wait()
            entry_rows, (grad, entry_gradient_rows, entry_scales), *_ = entry
            rows.append(entry_rows)
            if entry_gradient_rows is None:
                entry_gradient_rows = torch.arange(entry_rows.numel(), device=grad.device)
            gradient_rows.append(entry_gradient_rows.long() + first)
            if entry_scales is None:
                entry_scales = torch.ones(entry_rows.numel(), device=grad.device)
            scales.append(entry_scales)
            first += grad.shape[0]
        grads = torch.cat([entry.gradients.grad for entry in entries])
        merged = RowGradients(grads, torch.cat(gradient_rows), torch.cat(scales))
        return RecordedGradients(torch.cat(rows), merged)

    def summed(self) -> tuple[Runs, Tensor] | None:
        """The runs of equal rows and the sum of each, float32 ``[L, D]``; None where there are no
        gradients. All are one entry from then on."""
        merged = self.merged()
        if merged is None:
            return None
        if self._sums is None:
            merged.wait()
            runs = merged.runs(self._group.num_rows)
            self._entries = [merged._replace(known_runs=runs)]
            self._sums = self._entries[0], runs, summed_gradients(runs, merged.gradients)
        return self._sums[1:]

    def scale(self, factor: Tensor, table: "Table | None" = None) -> None:
        """Multiply the gradients of ``table``, or of all, by ``factor``, float32 ``[]``."""
        scaled = []
        for entry in self._current():
            entry.wait()
            scales, gradients = factor.expand(entry.rows.numel()), entry.gradients
            if table is not None and len(self._group.tables) > 1:
                scales = torch.where(self._are_of(table, entry.rows), scales, 1.0)
            if gradients.scales is not None:
                scales = scales * gradients.scales
            scaled.append(entry._replace(gradients=gradients._replace(scales=scales)))
        self._set(scaled)

    def sums_of(self, table: "Table") -> Tensor:
        """The sums of runs that are rows of ``table``, float32 ``[L, D]``; zeros elsewhere."""
        summed = self.summed()
        if summed is None:
            return torch.zeros(0, table.num_columns, device=self._group.weight.device)
        runs, sums = summed
        return torch.where(self._are_of(table, runs.unique_rows).unsqueeze(1), sums, 0.0)

    def change_sums(self, table: "Table", change: Callable[[Tensor], Tensor]) -> None:
        """Make each row's gradient what ``change`` makes of its sum, for the rows of ``table``."""
        summed = self.summed()
        if summed is not None:
            runs, sums = summed
            of_table = self._are_of(table, runs.unique_rows).unsqueeze(1)
            sums = torch.where(of_table, change(sums.clone()), sums)
            self._set([RecordedGradients(runs.unique_rows, RowGradients(sums))])

    def clear_table(self, table: "Table") -> None:
        """Forget the gradients of ``table``."""
        self._current()
        self._forget(table)

    def _forget(self, table: "Table") -> None:
        kept = []
        for entry in self._entries:
            rows = entry.rows.masked_fill(self._are_of(table, entry.rows), -1)
            kept.append(entry._replace(rows=rows, known_runs=None))
        self._set(kept)

    def dense_of(self, table: "Table") -> Tensor:
        """The gradient of ``table``, float32 ``[R, D]``."""
        merged, shape = self.merged(), table.parameter.shape
        if merged is None:
            return torch.zeros(shape, device=self._group.weight.device)
        merged.wait()
        first = self._group.first_row_of(table)
        rows = torch.where(self._are_of(table, merged.rows), merged.rows - first, -1)
        dense = WeightGradient.DENSE
        return table_gradient(rows, merged.gradients, shape, torch.float32, dense)

    def _are_of(self, table: "Table", rows: Tensor) -> Tensor:
        """True, bool ``[L]``, for each of ``rows`` that is one of ``table``."""
        first = self._group.first_row_of(table)
        return (rows >= first) & (rows < first + table.num_rows)
