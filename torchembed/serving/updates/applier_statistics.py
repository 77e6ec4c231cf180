"""Counts of updates that were applied or dropped, and how old they were by then."""

import enum
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torchembed.streams import Lag, RowUpdate, Update

FRESHNESS_BOUNDS_SECONDS = tuple(
    digit * 10.0**power for power in range(-3, 3) for digit in (1, 2, 5)
)
"""Upper bounds of the buckets of an update's age."""


class DropReason(enum.Enum):
    """Why an update was not applied; values are those of counters."""

    REPEATED = "repeated"
    """It, or a later one of its publisher, was applied before."""
    OLD_VERSION = "old_version"
    """It is of a version of the model before that of what was applied."""
    UNKNOWN = "unknown"
    """There is no such model or table."""
    UNFIT = "unfit"
    """Its rows have another width than the table, or its tensors are not those of the model."""


class Freshness(NamedTuple):
    """A histogram of the seconds from when updates were published until lookups saw them, by the
    clocks of both machines."""

    upper_bounds: tuple[float, ...]
    """Ascending, without infinity."""
    counts: tuple[int, ...]
    """Of what is within each bound and above the one before; one more, for what is above all."""
    sum_seconds: float


class TableUpdates(NamedTuple):
    """What was applied to a table."""

    num_rows: int = 0
    num_deletions: int = 0
    version: int = 0
    """The greatest one of its updates; 0 where they named none."""


@dataclass(frozen=True, kw_only=True)
class ApplierStatistics:
    """Totals of an :class:`~torchembed.serving.updates.UpdateApplier`."""

    is_running: bool
    num_updates: int
    """Applied ones of rows, each of one message."""
    num_rows: int
    num_deletions: int
    num_dense_parts: int
    num_dropped: Mapping[DropReason, int]
    num_retries: int
    """How often receiving or applying updates failed for now, and was tried again."""
    tables: Mapping[tuple[str, str], TableUpdates]
    """By model and table."""
    dense_versions: Mapping[str, int]
    """The version of the last dense part of each model."""
    freshness: Mapping[str, Freshness]
    """By model."""
    lag: Lag


@dataclass
class _Ages:
    counts: list[int] = field(default_factory=lambda: [0] * (len(FRESHNESS_BOUNDS_SECONDS) + 1))
    sum_seconds: float = 0.0


class ApplierTotals:
    """Counts that one thread adds to, and any may read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_updates = self._num_retries = 0
        self._num_dropped: Counter[DropReason] = Counter()
        self._tables: dict[tuple[str, str], TableUpdates] = {}
        self._num_dense_parts = 0
        self._dense_versions: dict[str, int] = {}
        self._ages: dict[str, _Ages] = {}
        self.lag = Lag(0, 0.0)

    def note_applied(self, update: Update) -> None:
        """Count an update that lookups see from now on."""
        published_at, now = update.origin.published_at, time.time()
        with self._lock:
            if isinstance(update, RowUpdate):
                place = update.model, update.table
                known = self._tables.get(place, TableUpdates())
                self._num_updates += 1
                self._tables[place] = TableUpdates(
                    known.num_rows + len(update.keys),
                    known.num_deletions + len(update.deleted_keys),
                    max(known.version, update.version),
                )
            else:
                self._num_dense_parts += 1
                self._dense_versions[update.model] = update.version
            if published_at:
                # The publisher's clock may be ahead of this one.
                age = max(now - published_at, 0.0)
                ages = self._ages.setdefault(update.model, _Ages())
                ages.counts[bisect_left(FRESHNESS_BOUNDS_SECONDS, age)] += 1
                ages.sum_seconds += age

    def note_dropped(self, reason: DropReason) -> None:
        """Count an update that was not applied, and will not be."""
        with self._lock:
            self._num_dropped[reason] += 1

    def note_retry(self) -> None:
        """Count an update that is to be applied again."""
        with self._lock:
            self._num_retries += 1

    def statistics(self, *, is_running: bool) -> ApplierStatistics:
        """The totals of now."""
        with self._lock:
            return ApplierStatistics(
                is_running=is_running,
                num_updates=self._num_updates,
                num_rows=sum(table.num_rows for table in self._tables.values()),
                num_deletions=sum(table.num_deletions for table in self._tables.values()),
                num_dense_parts=self._num_dense_parts,
                num_dropped=dict(self._num_dropped),
                num_retries=self._num_retries,
                tables=dict(self._tables),
                dense_versions=dict(self._dense_versions),
                freshness={
                    model: Freshness(FRESHNESS_BOUNDS_SECONDS, tuple(ages.counts), ages.sum_seconds)
                    for model, ages in self._ages.items()
                },
                lag=self.lag,
            )
