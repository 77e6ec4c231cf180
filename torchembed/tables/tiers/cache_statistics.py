"""Statistics of caches of rows, read without waiting for a GPU."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchembed.core.host_numbers import HostNumbers
from torchembed.ops.row_cache import CacheCounter
from torchembed.tables.latest_reading import LatestReading
from torchembed.tables.tiers.disk_group import DiskGroup
from torchembed.tables.tiers.tiered_group import TieredGroup

K = TypeVar("K")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheStatistics:
    """Counts of a cache on the device of rows in host memory or on disk, all of one moment between
    two steps, since the tables got their optimizer; or sums of those of several caches.

    Only batches that are trained count. Each counts once, where it is prepared: ahead of its step
    in a ``TrainPipeline``, else in its forward. Rows that evaluation reads count nowhere.
    """

    capacity: int
    """Rows that the cache has room for."""
    size: int
    """Rows that are in it."""
    requested: int
    """Ids that have a row, duplicates counted."""
    unique: int
    """Distinct rows of each batch."""
    unique_misses: int
    """Distinct rows of each batch that were not in the cache when the batch was prepared."""
    conflict_misses: int
    """Of these, all that batches missed for which the cache had no room ahead of their step, beside
    the batch before; of tables on disk also all that those missed of which a row was not in host
    memory when they were prepared."""
    batches_refused: int
    """Batches for which the cache had no room ahead of their step."""
    batches_fetched_late: int
    """Batches that were prepared ahead and whose rows were fetched at the beginning of their step:
    those that were refused or waited for the disk, and those that a :meth:`write_back` between two
    steps emptied the cache of."""
    rows_read_ahead: int
    """Rows that were read from the host ahead of their step."""
    rows_read_in_step: int
    """Rows that a step read from the host before it could look them up: those of batches that were
    fetched late, and those of forwards without a pipeline."""
    write_backs: int
    """Rows that were written to the host, to make room or since all were to be."""
    bytes_read: int
    """Bytes that were read from the host: rows with their optimizer state."""
    bytes_written: int
    """Bytes that were written to the host."""
    host_capacity: int = 0
    """Rows that the memory of the host has room for, of tables on disk; this and all that follow
    are 0 for tables in host memory."""
    host_size: int = 0
    """Rows that are in it."""
    host_misses: int = 0
    """Distinct rows of each batch that were not in it when the batch was prepared."""
    disk_rows_read: int = 0
    """Rows that came into it: from disk, or made anew where the disk has none."""
    disk_rows_written: int = 0
    """Rows that were written to disk, to make room or since all were to be."""
    disk_bytes_read: int = 0
    """Bytes of the rows that came, with their optimizer state."""
    disk_bytes_written: int = 0
    """Bytes that were written to disk."""

    @property
    def hit_rate(self) -> float:
        """The part of the distinct rows of batches that were in the cache when the batch was
        prepared; 0 before the first one."""
        return 1 - self.unique_misses / self.unique if self.unique else 0.0

    @property
    def rows_read(self) -> int:
        """Rows that were read from the host."""
        return self.rows_read_ahead + self.rows_read_in_step

    def scalars(self) -> dict[str, float]:
        """The counts and the hit rate, by name, as metrics take them."""
        return {**dataclasses.asdict(self), "hit_rate": self.hit_rate}


_FIELDS = tuple(field.name for field in dataclasses.fields(CacheStatistics))
_FIELDS_BELOW = tuple(name for name in _FIELDS if name.startswith(("host_", "disk_")))


class CountedCaches(NamedTuple, Generic[K]):
    """Caches whose counters are read together, by name."""

    caches: Mapping[K, Sequence[TieredGroup]]
    """Groups of this rank, whose figures are added up under each name. The same names on all ranks
    of ``group``."""
    device: torch.device
    """The device of all of them."""
    group: dist.ProcessGroup | None = None
    """The ranks over which the figures are added up; None for this one's."""


class CacheStatisticsReading(Generic[K]):
    """A copy of the counters of caches to the host, which was begun on the current stream.

    Collective over the ranks whose figures are added up. Waits for no GPU.

    Args:
        counted: the caches; names differ.
    """

    @torch.no_grad()
    def __init__(self, counted: Iterable[CountedCaches[K]]) -> None:
        self._parts: list[tuple[list[K], HostNumbers]] = []
        for caches, device, group in counted:
            if not caches or device.type == "meta":
                continue
            none = torch.zeros(len(_FIELDS), dtype=torch.int64, device=device)
            sums = [sum(map(_counts, groups), none) for groups in caches.values()]
            counts = torch.stack(sums)
            if group is not None:
                dist.all_reduce(counts, group=group)
            self._parts.append((list(caches), HostNumbers(counts)))

    @property
    def has_arrived(self) -> bool:
        """True once :meth:`result` no longer waits."""
        return all(numbers.have_arrived for _, numbers in self._parts)

    def result(self) -> dict[K, CacheStatistics]:
        """The statistics by name; waits for the copy."""
        return {
            name: CacheStatistics(**dict(zip(_FIELDS, counts, strict=True)))
            for names, numbers in self._parts
            for name, counts in zip(names, numbers.tolist(), strict=True)
        }


def _counts(group: TieredGroup) -> Tensor:
    """int64, one for each field of :class:`CacheStatistics`: those of a group; new memory."""
    of_forwards, late, late_batches, requested = group.counters
    ahead = group.cache.counters
    admitted, moved = ahead + of_forwards, ahead + of_forwards + late

    def of(counters: Tensor, counter: CacheCounter) -> Tensor:
        return counters[counter : counter + 1]

    read = of(moved, CacheCounter.READ_ROWS)
    read_ahead = of(ahead, CacheCounter.READ_ROWS)
    written = of(moved, CacheCounter.WRITTEN_ROWS)
    by_name = {
        "capacity": torch.full_like(read, group.cache.row_of_slot.numel()),
        "size": (group.cache.row_of_slot >= 0).sum(0, keepdim=True),
        "requested": requested,
        "unique": of(admitted, CacheCounter.UNIQUE_ROWS),
        "unique_misses": of(admitted, CacheCounter.UNIQUE_MISSES),
        # A batch that is not refused reads all rows that it misses.
        "conflict_misses": of(ahead, CacheCounter.UNIQUE_MISSES) - read_ahead,
        "batches_refused": of(ahead, CacheCounter.REFUSED_BATCHES),
        "batches_fetched_late": late_batches,
        "rows_read_ahead": read_ahead,
        "rows_read_in_step": read - read_ahead,
        "write_backs": written,
        "bytes_read": read * group.line_bytes,
        "bytes_written": written * group.line_bytes,
    }
    by_name |= _counts_below(group, torch.zeros_like(read))
    return torch.cat([by_name[name] for name in _FIELDS])


def _counts_below(group: TieredGroup, none: Tensor) -> dict[str, Tensor]:
    """The counts of host memory, and of the disk below it; ``none``, a zero, for groups without."""
    if not isinstance(group, DiskGroup):
        return dict.fromkeys(_FIELDS_BELOW, none)
    counters = group.host.counters
    misses, written, read = (
        counters[counter : counter + 1]
        for counter in (
            CacheCounter.UNIQUE_MISSES,
            CacheCounter.WRITTEN_ROWS,
            CacheCounter.READ_ROWS,
        )
    )
    return {
        "host_capacity": torch.full_like(none, group.host.row_of_slot.numel()),
        "host_size": (group.host.row_of_slot >= 0).sum(0, keepdim=True),
        "host_misses": misses,
        "disk_rows_read": read,
        "disk_rows_written": written,
        "disk_bytes_read": read * group.line_bytes,
        "disk_bytes_written": written * group.line_bytes,
    }


class CacheStatisticsReader(LatestReading[tuple[str, ...], CacheStatistics]):
    """Reads the statistics of one module's caches again and again, without waiting."""

    def read(
        self, counted: CountedCaches[tuple[str, ...]], *, wait: bool
    ) -> dict[tuple[str, ...], CacheStatistics]:
        """The statistics of caches, by the names of their tables, that arrived last; of now where
        ``wait`` is True."""
        return self.after(CacheStatisticsReading([counted]), wait=wait)
