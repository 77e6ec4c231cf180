"""Growth of a module's dynamic tables, decided between batches without waiting for a GPU."""

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.host_numbers import HostNumbers
from torchembed.tables.dynamic.group_growth import GrownGroup
from torchembed.tables.dynamic.hash_index import HashIndex
from torchembed.tables.group import TableGroup
from torchembed.tables.table import RankMaximum, Table

_logger = logging.getLogger(__name__)

_BATCHES_UNTIL_GROWN = 3
"""A table grows before the third batch after the one that brought too many ids: where batches are
prepared ahead, what the host knows then of the second one before is on its way for a whole step."""
_AT_ONCE = 2**31


class GrowingTables(NamedTuple):
    """The tables of a module that start with fewer rows than they have at last."""

    parts: Sequence[Sequence[Table]]
    """For each of them the parts that this rank holds, on all ranks in the same order."""
    device: torch.device
    max_over: RankMaximum | None
    """Makes an int64 tensor the greatest of those on all ranks; None on one."""

    @property
    def are_in_use(self) -> bool:
        """True if a forward, which no update has followed, has admitted ids of some of them."""
        return any(_is_in_use(part.group) for parts in self.parts for part in parts)


class TableGrowth:
    """Lets the dynamic tables of one module grow between batches.

    What tables will need is counted on the device (:class:`GrowthDemand`) and copied to the host
    while it goes on. By those copies tables grow before the same batches, whether a loop by hand or
    a pipeline trains them, and on all ranks alike. A table whose rows no fused optimizer updates
    gets all of its rows before its first batch, since torch's optimizers keep states of one shape.

    Where memory ends, tables stay as they are from then on, and a warning says so.

    Attributes:
        is_held: True while a pipeline decides, so that forwards do not.
        is_over: True once no table will grow any more.
        due_next: what the last :meth:`due` knew of the batch after the next one.
    """

    def __init__(self) -> None:
        self.is_held = False
        self.begin_anew()

    def begin_anew(self) -> None:
        """Decide anew, after tables were loaded."""
        self._noted: HostNumbers | None = None
        self._is_first, self.is_over = True, False
        self.due_next: dict[int, int] = {}

    def __getstate__(self) -> dict[str, object]:
        """Copies and pickles decide anew."""
        return vars(TableGrowth())

    def due(self, tables: GrowingTables, num_batches: int = 1) -> dict[int, int]:
        """The rows that each table, by its number, needs before the next batch is
        admitted; those that need no more are left out. Collective on several ranks.

        Args:
            num_batches: that were admitted since the last call, 0 to 2.
        """
        self.due_next = {}
        if self.is_over:
            return {}
        due = {}
        if self._noted is not None:
            due = self._needed(self._noted, num_batches)
            self.due_next = self._needed(self._noted, num_batches + 1)
        if not due and not self.is_over:
            self._noted = HostNumbers(_demand(tables))
            if self._is_first:
                self._is_first = False
                due = self._needed(self._noted, 0)
        return due

    def _needed(self, noted: HostNumbers, num_batches: int) -> dict[int, int]:
        demand = noted.tolist()
        self.is_over = not any(may_grow for may_grow, _, _ in demand)
        return {
            number: num_rows
            for number, (may_grow, age, num_rows) in enumerate(demand)
            if may_grow and age and age + num_batches >= _BATCHES_UNTIL_GROWN
        }

    def grow(self, tables: GrowingTables, due: Mapping[int, int]) -> bool:
        """Let the tables that are ``due`` grow, all or none; waits for the device. Collective.

        Returns:
            True if they have grown. False where there is no memory, after a warning, and where a
            batch is under way, after which they are due again.
        """
        num_rows = {
            part: _rows_for(part, wanted)
            for number, wanted in due.items()
            for part in tables.parts[number]
        }
        groups = list(dict.fromkeys(part.group for part in num_rows))
        if _on_any_rank(tables, any(map(_is_in_use, groups))):
            return False
        grown: list[GrownGroup] = []
        has_failed = False
        try:
            for group in groups:
                of_group = [num_rows.get(table, table.num_rows) for table in group.tables]
                grown.append(GrownGroup(group, of_group))
        except torch.OutOfMemoryError:
            has_failed = True
        self._noted = None
        if _on_any_rank(tables, has_failed):
            self.is_over = True
            names = ", ".join(part.spec.name for part in num_rows)
            warnings.warn(
                f"dynamic tables {names or 'of another rank'} do not grow any more, since there is "
                "no memory for more rows: they evict ids where they are full. Free memory, or take "
                "a smaller num_embeddings",
                stacklevel=4,
            )
            return False
        for group in grown:
            group.take_place()
        for part, count in num_rows.items():
            _logger.info("dynamic table %s has %d rows from now on", part.spec.name, count)
        return True


def _on_any_rank(tables: GrowingTables, is_true: bool) -> bool:
    if tables.max_over is None:
        return is_true
    flag = torch.tensor([int(is_true)], dtype=torch.int64, device=tables.device)
    tables.max_over(flag)
    return bool(flag)


def _is_in_use(group: TableGroup) -> bool:
    index = group.index
    assert isinstance(index, HashIndex)
    is_used = index.has_forwards_under_way and group.rule is not None
    return is_used or bool(group.pending) or bool(group.num_awaited)


def _demand(tables: GrowingTables) -> Tensor:
    """:meth:`GrowthDemand.at` of all tables, the greatest over ranks, int64 ``[tables, 3]``."""
    held = [parts[0] for parts in tables.parts if parts]
    group = held[0].group if held else None
    if group is not None and tables.max_over is None and held == group.tables:
        index = group.index
        if isinstance(index, HashIndex) and index.demand is not None and group.rule is not None:
            return index.demand.latest.clone()  # as in most steps: those wait for the host
    none = torch.zeros(3, dtype=torch.int64, device=tables.device)
    rows = [_demand_of(parts[0]) if parts else none for parts in tables.parts]
    demand = torch.stack(rows)
    if tables.max_over is not None:
        tables.max_over(demand)
    return demand


def _demand_of(table: Table) -> Tensor:
    """The demand of a table, int64 ``[3]``; its other parts on this rank hold the same ids."""
    group, device = table.group, table.group.weight.device
    assert isinstance(group.index, HashIndex)
    if table.num_rows == table.max_rows or group.index.demand is None:
        return torch.zeros(3, dtype=torch.int64, device=device)
    if group.rule is None and table.parameter.requires_grad:
        return torch.tensor([1, _AT_ONCE, table.max_rows], dtype=torch.int64, device=device)
    return group.index.demand.latest[group.tables.index(table)]


def _rows_for(table: Table, wanted: int) -> int:
    """The rows of ``table`` with room for ``wanted`` ids."""
    index = table.group.index
    assert isinstance(index, HashIndex)
    return index.rows_with(table.group.tables.index(table), wanted)
