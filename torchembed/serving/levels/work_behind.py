"""Work that lookups leave to a thread behind them."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.serving.levels.embedding_cache import EmbeddingCache, FoundRows
from torchembed.serving.levels.insertion_thread import InsertionThread
from torchembed.serving.levels.lookup_statistics import Count, LookupTotals
from torchembed.serving.levels.missing_rows import MissingRows

_MAX_WAITING_LOOKUPS = 64
"""Lookups that wait for the thread. What further ones missed is not inserted, and is missed again.
"""
_LOOKUPS_BETWEEN_KEPT = 16
"""Lookups between two whose uses a cache of whole tables notes."""


class _Missed(NamedTuple):
    """A lookup that missed some ids."""

    ids: tuple[Tensor, Tensor, Tensor] | None
    """Keys, tables, and which of them are missing; None where there is no level to read."""
    num_missing: Tensor | None
    """int64 ``[1]``; None where they are counted already."""
    event: torch.cuda.Event | None
    """When these are there, on a GPU."""


class _Used(NamedTuple):
    """A lookup whose uses are to be noted."""

    found: FoundRows
    event: torch.cuda.Event | None
    """When they are found, on a GPU."""


class WorkBehind:
    """Inserts rows that lookups missed, and has the rows that they use most on the device, by a
    thread.

    Args:
        cache: that is looked up.
        missing: reads what it lacks; None where nothing is below it.
        totals: in which lookups are counted.
    """

    def __init__(
        self,
        cache: EmbeddingCache,
        missing: MissingRows | None,
        totals: LookupTotals,
    ) -> None:
        self._cache, self._missing, self._totals = cache, missing, totals
        self._thread = InsertionThread[_Missed | _Used](
            self._work, lambda: totals.add(Count.FAILED_INSERTIONS), _MAX_WAITING_LOOKUPS
        )
        self._num_until_kept = 0
        """Lookups before the next one whose uses are noted."""

    def insert(self, keys: Tensor, tables: Tensor, found: FoundRows, *, is_counted: bool) -> None:
        """Insert the rows that a lookup of ``keys [L]`` of ``tables [L]`` missed, and count them
        unless they are."""
        self._totals.add(Count.ASYNCHRONOUS_LOOKUPS)
        ids = None
        if self._missing is not None:
            # The caller may have other ids in the memory of these once it has its answer.
            ids = keys.clone(), tables.clone(), found.is_missing.clone()
        elif is_counted:
            return
        num_missing = None if is_counted else found.num_missing
        if not self._thread.offer(_Missed(ids, num_missing, _event_of(keys))):
            self._totals.add(Count.DROPPED_INSERTIONS)

    def keep(self, found: FoundRows) -> None:
        """Note the uses of some lookups, and have the rows on the device that were used most. To
        note those of each lookup would take much of its time, and rows that are used often are
        among those of any."""
        self._num_until_kept -= 1
        if self._num_until_kept < 0:
            self._thread.offer(_Used(found, _event_of(found.is_missing)))
            self._num_until_kept = _LOOKUPS_BETWEEN_KEPT

    def wait(self) -> None:
        """Return when all that was asked for by now is done."""
        self._thread.wait()

    def close(self) -> None:
        """Do what waits, and end the thread."""
        self._thread.close()

    @torch.no_grad()
    def _work(self, item: _Missed | _Used) -> None:
        if item.event is not None:
            item.event.synchronize()
        if isinstance(item, _Used):
            with self._cache.access.writing():
                self._cache.keep(item.found)
            return
        if item.num_missing is not None:
            num_missing = int(item.num_missing)
            self._totals.add(Count.MISSES, num_missing)
            self._totals.add(Count.DEFAULTS, num_missing)
            if not num_missing:
                return
        if self._missing is not None and item.ids is not None:
            self._missing.fetch(*item.ids)


def _event_of(tensor: Tensor) -> torch.cuda.Event | None:
    """When all that was enqueued for ``tensor`` by now is done; None for one that is on no GPU."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event
