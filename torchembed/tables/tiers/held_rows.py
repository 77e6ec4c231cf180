"""The rows that are in host memory, as the host knows them, and those that batches to come use."""

import threading
from typing import NamedTuple

import numpy as np
from torch import Tensor

from torchembed.tables.tiers.line_store import AnnouncedLines


class HeldRows:
    """The row at each place of host memory, and the announced batches that use each row; for
    several threads.

    Takes 8 bytes a place, and 5 bytes a row once batches are announced.

    Args:
        num_places: of host memory.
    """

    def __init__(self, num_places: int) -> None:
        self._row_at = np.full(num_places, -1, dtype=np.int64)
        self._is_held: np.ndarray | None = None
        self._last_use = np.empty(0, dtype=np.int32)
        """For each row the number of the last announcement that has named it."""
        self._last = self._retired = 0
        self._lock = threading.Lock()

    def note(self, places: Tensor, rows: Tensor) -> np.ndarray:
        """Rows, int64 ``[n]``, have come to ``places``, int64 ``[n]``, each once.

        Returns:
            int64 ``[m]``: the rows that were there before, and that announced batches use.
        """
        at, now = places.numpy(), rows.numpy()
        with self._lock:
            gone, self._row_at[at] = self._row_at[at], now
            if self._is_held is None:
                return gone[:0]
            gone = gone[gone >= 0]
            self._is_held[gone] = False
            self._is_held[now] = True
            return gone[(self._last_use[gone] > self._retired) & ~self._is_held[gone]]

    def forget(self) -> None:
        """No place holds a row any more."""
        with self._lock:
            self._row_at.fill(-1)
            if self._is_held is not None:
                self._is_held.fill(False)

    def announce(self, rows: np.ndarray, num_rows: int) -> tuple[int, np.ndarray]:
        """A batch to come uses ``rows``, int64 ``[n]``, of a group with ``num_rows``.

        Returns:
            The number of the announcement, and those of the rows that are at no place.
        """
        with self._lock:
            if self._is_held is None:
                self._is_held = np.zeros(num_rows, dtype=np.bool_)
                self._is_held[self._row_at[self._row_at >= 0]] = True
                self._last_use = np.zeros(num_rows, dtype=np.int32)
            self._last += 1
            self._last_use[rows] = self._last
            return self._last, rows[~self._is_held[rows]]

    def retire(self, number: int) -> None:
        """The batch of an announcement, and those before it, need nothing any more."""
        with self._lock:
            self._retired = max(self._retired, number)


class AnnouncedRows(NamedTuple):
    """Rows that a batch to come uses."""

    held: HeldRows
    number: int
    lines: AnnouncedLines | None
    """The lines of rows that were not in host memory; None where none were on disk either."""

    def retire(self) -> None:
        """Let go of them, and of those that were announced before."""
        self.held.retire(self.number)
        if self.lines is not None:
            self.lines.retire()
