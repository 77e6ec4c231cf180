"""Which rows changed while others were being copied from one level to another."""

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class _Update:
    """An update of some keys of a table, under way until it has an end."""

    def __init__(self, table: str, keys: Tensor) -> None:
        self.table, self.keys = table, keys
        self.end: int | None = None


class Fetch(NamedTuple):
    """A copy under way: rows that were read since :attr:`start` are on their way elsewhere."""

    start: int


class UpdateLog:
    """The updates that a copy may not have seen, so that it undoes none of them.

    Whoever copies rows reads them inside :meth:`fetching`, and asks :meth:`are_current` before it
    writes them. Whoever updates rows does it inside :meth:`updating`. Between the question and the
    writing no update of the place that is written may happen: a lock of that place sees to it,
    which the update takes once it is inside :meth:`updating`, or :attr:`no_beginning`. Then either
    the copy is written first, and the update after it, or the copy is left out.
    """

    def __init__(self) -> None:
        self.no_beginning = threading.Lock()
        """While it is held no update begins."""
        self._lock = threading.Lock()
        """Guards all that follows."""
        self._clock = 0
        self._updates: list[_Update] = []
        self._starts: dict[int, int] = {}
        """The number of fetches under way that began at each moment."""

    @contextlib.contextmanager
    def updating(self, table: str, keys: Tensor) -> Iterator[None]:
        """Context in which the rows of ``keys``, int64 ``[n]``, may change in any level."""
        update = _Update(table, keys)
        with self.no_beginning, self._lock:
            self._updates.append(update)
        try:
            yield
        finally:
            with self._lock:
                self._clock += 1
                update.end = self._clock
                self._forget()

    @contextlib.contextmanager
    def fetching(self) -> Iterator[Fetch]:
        """Context in which rows are read that are written elsewhere later on."""
        with self._lock:
            fetch = Fetch(self._clock)
            self._starts[fetch.start] = self._starts.get(fetch.start, 0) + 1
        try:
            yield fetch
        finally:
            with self._lock:
                self._starts[fetch.start] -= 1
                if not self._starts[fetch.start]:
                    del self._starts[fetch.start]
                self._forget()

    def are_current(self, fetch: Fetch, table: str, keys: Tensor) -> Tensor:
        """Whether no update of each of ``keys [n]`` happened since ``fetch`` began: bool ``[n]``,
        on the CPU."""
        with self._lock:
            changed = [
                update.keys
                for update in self._updates
                if update.table == table and (update.end is None or update.end > fetch.start)
            ]
        if not changed:
            return torch.ones(keys.shape, dtype=torch.bool)
        return ~torch.isin(keys.cpu(), torch.cat(changed))

    def num_updates(self) -> int:
        """The updates that are remembered: none where nothing is under way."""
        with self._lock:
            return len(self._updates)

    def _forget(self) -> None:
        """Forget the updates that all fetches under way have seen."""
        oldest = min(self._starts, default=self._clock)
        self._updates = [
            update for update in self._updates if update.end is None or update.end > oldest
        ]
