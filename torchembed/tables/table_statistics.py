"""Statistics of dynamic tables, read without waiting for a GPU."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.host_numbers import HostNumbers
from torchembed.ops.hash_table import Counter
from torchembed.tables.group import TableGroup
from torchembed.tables.hash_index import HashIndex
from torchembed.tables.table import Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableStatistics:
    """Counts of a dynamic table, all of one moment between two training steps.

    ``size = inserted - evicted - erased``, and ``lookups = hits + misses``. Evaluation counts
    nothing.
    """

    epoch: int
    """Batches that were admitted to be trained until this moment."""
    capacity: int
    """Ids that the table has room for, in the rows held here alone."""
    size: int
    """Ids that have a row."""
    hits: int
    """Ids of trained batches that had a row, duplicates counted."""
    misses: int
    """Ids of trained batches that had none when the batch came, duplicates counted."""
    inserted: int
    """Ids that were given a row."""
    refused: int
    """New ids that found no row which may be evicted for them; counted once a batch."""
    evicted_full: int
    """Ids that went to make room for others."""
    evicted_expired: int
    """Ids that went because of their age."""
    evicted_target: int
    """Ids that went so that the table shrinks to a target."""
    erased: int
    """Ids that went since the caller named them."""
    evicted_age: int
    """The sum, over all ids that were evicted, of the epochs since their last use."""

    @property
    def load_factor(self) -> float:
        """The part of the rows that is taken, from 0 to 1."""
        return self.size / self.capacity if self.capacity else 0.0

    @property
    def lookups(self) -> int:
        """Ids of trained batches, duplicates counted."""
        return self.hits + self.misses

    @property
    def hit_rate(self) -> float:
        """The part of the ids of trained batches that had a row; 0 before the first one."""
        return self.hits / self.lookups if self.lookups else 0.0

    @property
    def admitted(self) -> int:
        """New ids that were to be given a row: inserted, or refused for want of one."""
        return self.inserted + self.refused

    @property
    def evicted(self) -> int:
        """Ids that were evicted, for any reason."""
        return self.evicted_full + self.evicted_expired + self.evicted_target

    @property
    def mean_evicted_age(self) -> float:
        """The mean number of epochs for which ids that were evicted had not been used; 0 before
        the first one."""
        return self.evicted_age / self.evicted if self.evicted else 0.0

    def scalars(self) -> dict[str, float]:
        """The counts and what follows from them, by name, as metrics take them."""
        counts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del counts["epoch"], counts["evicted_age"]
        rates = ("load_factor", "hit_rate", "admitted", "mean_evicted_age")
        return {**counts, **{name: getattr(self, name) for name in rates}}


def _statistics(epoch: int, capacity: int, counters: Sequence[int]) -> TableStatistics:
    return TableStatistics(
        epoch=epoch,
        capacity=capacity,
        size=counters[Counter.SIZE],
        hits=counters[Counter.HITS],
        misses=counters[Counter.MISSES],
        inserted=counters[Counter.INSERTED],
        refused=counters[Counter.REFUSED],
        evicted_full=counters[Counter.EVICTED_FULL],
        evicted_expired=counters[Counter.EVICTED_EXPIRED],
        evicted_target=counters[Counter.EVICTED_TARGET],
        erased=counters[Counter.ERASED],
        evicted_age=counters[Counter.EVICTED_AGE],
    )


class _OfGroup(NamedTuple):
    """The counters of a group's tables, on their way to the host."""

    names: list[str]
    capacities: list[int]
    numbers: HostNumbers
    """The counters of each table, and behind them the epoch."""


class StatisticsReading:
    """A copy of the counters of dynamic tables to the host, which was begun on the current stream.

    Tables that are not dynamic are left out.

    Args:
        tables: by name; on any devices.
    """

    @torch.no_grad()
    def __init__(self, tables: dict[str, Table]) -> None:
        self._groups: list[_OfGroup] = []
        by_group: dict[TableGroup, list[tuple[str, Table]]] = {}
        for name, table in tables.items():
            by_group.setdefault(table.group, []).append((name, table))
        for group, named in by_group.items():
            if isinstance(group.index, HashIndex) and group.weight.device.type != "meta":
                numbers = [group.tables.index(table) for _, table in named]
                self._groups.append(
                    _OfGroup(
                        [name for name, _ in named],
                        [group.index.capacity(number) for number in numbers],
                        HostNumbers(_counts(group.index, numbers)),
                    )
                )

    @property
    def has_arrived(self) -> bool:
        """True once :meth:`result` no longer waits."""
        return all(group.numbers.have_arrived for group in self._groups)

    def result(self) -> dict[str, TableStatistics]:
        """The statistics by table name; waits for the copy."""
        found = {}
        for names, capacities, numbers in self._groups:
            *counters, (epoch, *_) = numbers.tolist()
            for name, capacity, row in zip(names, capacities, counters, strict=True):
                found[name] = _statistics(epoch, capacity, row)
        return found


def _counts(index: HashIndex, numbers: Sequence[int]) -> Tensor:
    """int64 ``[T + 1, len(Counter)]``: the counters of tables, and a row that begins with the
    epoch; new memory, which later steps do not change."""
    counters = index.hash_tables.counters
    last = index.clock.last.expand(1, len(Counter))
    return torch.cat([counters[number : number + 1] for number in numbers] + [last])


class StatisticsReader:
    """Reads the statistics of one module's dynamic tables again and again, without waiting."""

    def __init__(self) -> None:
        self._under_way: StatisticsReading | None = None
        self._latest: dict[str, TableStatistics] = {}

    def __getstate__(self) -> dict[str, object]:
        """Copies and pickles have read nothing yet."""
        return {"_under_way": None, "_latest": {}}

    def read(self, tables: dict[str, Table], *, wait: bool) -> dict[str, TableStatistics]:
        """The statistics of ``tables``, by name, that arrived last.

        Where no copy is under way, begins one. Where ``wait`` is True, the figures are of now.
        """
        if wait or self._under_way is None:
            self._under_way = StatisticsReading(tables)
        if wait or self._under_way.has_arrived:
            self._latest, self._under_way = self._under_way.result(), None
        return dict(self._latest)
