"""Keys in the order in which they are to be read."""

from collections import deque

import numpy as np

_MAX_PLANNED = 1 << 20
"""Most keys that are sorted at once, while readers wait; reading so many takes far longer."""


class AnnouncedKeys:
    """Announcements of keys, and the plan of those that are read next, in ascending order.

    Announcements take 8 bytes a key. Not for several threads at once.

    Attributes:
        retired: number of the last announcement that needs no lines any more.
    """

    def __init__(self, last: int = 0) -> None:
        self._last = self.retired = last
        self._waiting: deque[tuple[int, np.ndarray]] = deque()
        self._keys = self._numbers = np.empty(0, dtype=np.int64)
        self._is_wanted = np.empty(0, dtype=np.bool_)
        self._next = 0

    def __bool__(self) -> bool:
        return self._next < len(self._keys) or bool(self._waiting)

    def emptied(self) -> "AnnouncedKeys":
        """One without keys, whose announcements have greater numbers."""
        return AnnouncedKeys(self._last)

    def add(self, keys: np.ndarray) -> int:
        """Announce ``keys``, ascending and distinct; the number of the announcement."""
        self._last += 1
        if len(keys):
            self._waiting.append((self._last, keys))
        return self._last

    def retire(self, number: int) -> None:
        """Drop the keys of announcement ``number`` and of those before it."""
        self.retired = max(self.retired, min(number, self._last))
        while self._waiting and self._waiting[0][0] <= self.retired:
            self._waiting.popleft()

    def cancel(self, keys: np.ndarray) -> None:
        """Drop ``keys`` from the plan."""
        rest = self._keys[self._next :]
        if len(rest) and len(keys):
            places = np.searchsorted(rest, keys).clip(max=len(rest) - 1)
            self._is_wanted[self._next :][places[rest[places] == keys]] = False

    def plan(self, max_keys: int) -> None:
        """Once the last plan is done, make one of the first ``max_keys`` keys announced."""
        if self._next < len(self._keys) or not self._waiting:
            return
        taken, num_keys, max_keys = [], 0, min(max_keys, _MAX_PLANNED)
        while self._waiting and num_keys < max_keys:
            number, keys = self._waiting.popleft()
            fitting = keys[: max_keys - num_keys]
            if len(fitting) < len(keys):
                self._waiting.appendleft((number, keys[len(fitting) :]))
            taken.append((number, fitting))
            num_keys += len(fitting)
        if not taken:
            return
        # Of keys of several announcements the last number counts, the first in the reverse order.
        taken.reverse()
        self._keys, first = np.unique(np.concatenate([k for _, k in taken]), return_index=True)
        self._numbers = np.concatenate([np.full(len(k), number) for number, k in taken])[first]
        self._is_wanted = np.ones(len(self._keys), dtype=np.bool_)
        self._next = 0

    def next_piece(self, max_keys: int) -> tuple[np.ndarray, np.ndarray]:
        """The next keys of the plan, at most ``max_keys``, and the numbers of the last
        announcements that have named them; none after the plan's end."""
        while self._next < len(self._keys):
            piece = slice(self._next, self._next + max_keys)
            self._next = piece.stop
            kept = self._is_wanted[piece] & (self._numbers[piece] > self.retired)
            if kept.any():
                return self._keys[piece][kept], self._numbers[piece][kept]
        nothing = np.empty(0, dtype=np.int64)
        return nothing, nothing
