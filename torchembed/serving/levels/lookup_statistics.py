"""Counts of lookups through levels."""

import contextlib
import enum
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from torchembed.serving.levels.embedding_cache import TableCounts
from torchembed.serving.levels.level import LevelStatistics


class Stage(enum.Enum):
    """A part of a lookup whose time is counted."""

    CACHE = "cache"
    """Finding and reading what is cached; on a GPU having it done."""
    DEDUP = "dedup"
    """Finding the distinct ids that are missing, after waiting for their number."""
    LEVELS = "levels"
    """Reading them from the levels."""
    INSERT = "insert"
    """Writing them into the cache."""
    MERGE = "merge"
    """Putting them among those that were cached."""


class Count(enum.Enum):
    """What is counted of lookups and changes; :class:`LookupStatistics` says more."""

    LOOKUPS = "num_lookups"
    SYNCHRONOUS_LOOKUPS = "num_synchronous_lookups"
    ASYNCHRONOUS_LOOKUPS = "num_asynchronous_lookups"
    REQUESTED = "num_requested_ids"
    UNIQUE = "num_unique_ids"
    MISSES = "num_missed_ids"
    UNIQUE_MISSES = "num_unique_missed_ids"
    DEFAULTS = "num_default_ids"
    ABSENT_ROWS = "num_absent_rows"
    UNREADABLE_ROWS = "num_unreadable_rows"
    DROPPED_INSERTIONS = "num_dropped_insertions"
    FAILED_INSERTIONS = "num_failed_insertions"
    REFRESHED_ROWS = "num_refreshed_rows"
    UPDATED_ROWS = "num_updated_rows"
    DELETED_ROWS = "num_deleted_rows"


@dataclass(frozen=True, kw_only=True)
class LookupStatistics:
    """Totals of a :class:`LeveledLookup` since it was made; those of tables and levels count what
    others that share them did, too.

    Where a lookup waits for nothing, what it missed is counted as it is inserted behind.
    """

    num_lookups: int
    num_synchronous_lookups: int
    """Those that missed ids and waited for the levels."""
    num_asynchronous_lookups: int
    """Those that missed ids and were answered by default rows meanwhile."""
    num_requested_ids: int
    """Repeated ones counted."""
    num_unique_ids: int
    """Distinct ids of the lookups that missed some; of all others nobody needs their number."""
    num_missed_ids: int
    """Ids that were not cached, repeated ones counted."""
    num_unique_missed_ids: int
    """Distinct ids that were not cached, for which the levels were asked."""
    num_default_ids: int
    """Ids that were answered by their table's default row, repeated ones counted."""
    num_absent_rows: int
    """Distinct ids of lookups that no level has."""
    num_unreadable_rows: int
    """Distinct ids of lookups that no level gave, while one of them was away."""
    num_dropped_insertions: int
    """Lookups whose missing rows were not inserted behind, since too many waited."""
    num_failed_insertions: int
    """Lookups whose missing rows were not inserted behind, since that raised; the log says what."""
    num_refreshed_rows: int
    num_updated_rows: int
    num_deleted_rows: int
    seconds: dict[str, float]
    """Time of all lookups in each :class:`Stage`, by its value."""
    tables: dict[str, TableCounts]
    """Counts of the cache, by table."""
    levels: tuple[LevelStatistics, ...]
    """Counts of the levels below it, the uppermost first."""

    @property
    def hit_rate(self) -> float:
        """The part of the requested ids that were cached; 0 before the first one."""
        if not self.num_requested_ids:
            return 0.0
        return 1 - self.num_missed_ids / self.num_requested_ids


class LookupTotals:
    """Counts and times that any number of threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(Count, 0)
        self._seconds = dict.fromkeys(Stage, 0.0)

    def add(self, count: Count, number: int = 1) -> None:
        """Add ``number`` to a count."""
        with self._lock:
            self._counts[count] += number

    @contextlib.contextmanager
    def timed(self, stage: Stage) -> Iterator[None]:
        """Context whose time belongs to ``stage``."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - begin
            with self._lock:
                self._seconds[stage] += seconds

    def statistics(
        self, tables: dict[str, TableCounts], levels: tuple[LevelStatistics, ...]
    ) -> LookupStatistics:
        """The totals of now, with counts of tables and levels."""
        with self._lock:
            return LookupStatistics(
                **{count.value: number for count, number in self._counts.items()},
                seconds={stage.value: seconds for stage, seconds in self._seconds.items()},
                tables=tables,
                levels=levels,
            )
