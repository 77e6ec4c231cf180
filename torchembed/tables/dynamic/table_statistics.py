"""Statistics of dynamic tables, read without waiting for a GPU."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchembed.core.host_numbers import HostNumbers
from torchembed.ops.hash_table import Counter
from torchembed.tables.dynamic.hash_index import HashIndex
from torchembed.tables.latest_reading import LatestReading
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
    """Ids that the table has room for."""
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


class CountedTables(NamedTuple):
    """Dynamic tables whose counters are read together, by name."""

    tables: Mapping[str, Table | None]
    """This rank's part of each; None where it holds none. The same names on all ranks."""
    device: torch.device
    """The device of all tables."""
    group: dist.ProcessGroup | None = None
    """The ranks that share the tables; None for one."""


class StatisticsReading:
    """A copy of the counters of dynamic tables to the host, which was begun on the current stream.

    Collective over the ranks that share tables: their counts are added up on the device, and each
    rank gets those of the whole tables. Waits for no GPU.

    Args:
        counted: the tables; names differ.
    """

    @torch.no_grad()
    def __init__(self, counted: Iterable[CountedTables]) -> None:
        self._parts: list[tuple[list[str], HostNumbers]] = []
        for tables, device, group in counted:
            if not tables or device.type == "meta":
                continue
            counts = torch.stack([_counts(table, device) for table in tables.values()])
            if group is not None:
                dist.all_reduce(counts, group=group)
            self._parts.append((list(tables), HostNumbers(counts)))

    @property
    def has_arrived(self) -> bool:
        """True once :meth:`result` no longer waits."""
        return all(numbers.have_arrived for _, numbers in self._parts)

    def result(self) -> dict[str, TableStatistics]:
        """The statistics by table name; waits for the copy."""
        found = {}
        for names, numbers in self._parts:
            for name, (*counters, epoch, capacity) in zip(names, numbers.tolist(), strict=True):
                found[name] = _statistics(epoch, capacity, counters)
        return found


def _counts(table: Table | None, device: torch.device) -> Tensor:
    """int64 ``[len(Counter) + 2]``: the counters of a table, and behind them its epoch and its
    capacity, of which the sums over the ranks that share it are those of the whole table; new
    memory, which later steps do not change."""
    if table is None or table.first_column:
        # Ranks of other columns hold the same ids.
        return torch.zeros(len(Counter) + 2, dtype=torch.int64, device=device)
    index = table.group.index
    assert isinstance(index, HashIndex)
    number = table.group.tables.index(table)
    # All ranks have come to the same epoch.
    epoch = index.clock.last if table.first_row == 0 else torch.zeros_like(index.clock.last)
    capacity = torch.full_like(epoch, index.capacity(number))
    return torch.cat([index.hash_tables.counters[number], epoch, capacity])


class StatisticsReader(LatestReading[str, TableStatistics]):
    """Reads the statistics of one module's dynamic tables again and again, without waiting."""

    def read(self, counted: CountedTables, *, wait: bool) -> dict[str, TableStatistics]:
        """The statistics of tables, by name, that arrived last; of now where ``wait`` is True.

        Collective over the ranks that share them.
        """
        # Begun by each call: when a copy arrives, each rank sees at another call.
        return self.after(StatisticsReading([counted]), wait=wait)
