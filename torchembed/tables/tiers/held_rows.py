"""The rows that are in host memory, as the host knows them."""

import threading

import numpy as np
from torch import Tensor


class HeldRows:
    """The row at each place of host memory, and which rows are at none; for several threads.

    Takes 8 bytes a place, and a byte a row once it is asked for rows.

    Args:
        num_places: of host memory.
    """

    def __init__(self, num_places: int) -> None:
        self._row_at = np.full(num_places, -1, dtype=np.int64)
        self._is_held: np.ndarray | None = None
        self._lock = threading.Lock()

    def note(self, places: Tensor, rows: Tensor) -> None:
        """Rows, int64 ``[n]``, have come to ``places``, int64 ``[n]``, each once."""
        at, now = places.numpy(), rows.numpy()
        with self._lock:
            if self._is_held is not None:
                gone = self._row_at[at]
                self._is_held[gone[gone >= 0]] = False
                self._is_held[now] = True
            self._row_at[at] = now

    def forget(self) -> None:
        """No place holds a row any more."""
        with self._lock:
            self._row_at.fill(-1)
            self._is_held = None

    def absent(self, rows: np.ndarray, num_rows: int) -> np.ndarray:
        """Those of ``rows``, int64 ``[n]``, of a group with ``num_rows``, that are at no place."""
        with self._lock:
            if self._is_held is None:
                self._is_held = np.zeros(num_rows, dtype=np.bool_)
                self._is_held[self._row_at[self._row_at >= 0]] = True
            return rows[~self._is_held[rows]]
