"""Times of admission epochs, by which rows expire after some seconds."""

import collections
import math
from collections.abc import Callable

import torch
from torch import Tensor

_NUM_MARKS = 64
"""Marks within a time to live, so that rows expire at most one part in 64 of it late."""


class EpochTimes:
    """Remembers which epoch was the last at which time, and turns a limit of seconds into an epoch.

    The host knows times, the device epochs: marks bring them together, without waiting.

    Args:
        ttl_seconds: how long rows live without use.
        clock: the time in seconds, from any beginning on.
        device: of the index.

    Attributes:
        newest: int64 ``[1]``: the last epoch that is at least ``ttl_seconds`` old; 0 for none.
    """

    def __init__(
        self, ttl_seconds: float, clock: Callable[[], float], device: torch.device
    ) -> None:
        self._ttl_seconds, self._clock = ttl_seconds, clock
        self.newest = torch.zeros(1, dtype=torch.int64, device=device)
        # Marks are apart by a part of the limit; three more for roundings and the newest one.
        self._epochs = torch.zeros(_NUM_MARKS + 3, dtype=torch.int64, device=device)
        self._times: collections.deque[tuple[float, int]] = collections.deque()
        self._latest = float("-inf")
        self._next = 0

    def note(self, last: Tensor) -> None:
        """Note that ``last``, int64 ``[1]``, is the newest epoch now. Between steps, not captured.

        Raises:
            TypeError: for a clock that returns no number.
            ValueError: if it says an earlier time than before, or none that is finite.
        """
        now = self._clock()
        if isinstance(now, bool) or not isinstance(now, int | float):
            raise TypeError(f"clock must return a number of seconds, got {now!r}")
        if not -math.inf < now < math.inf:
            raise ValueError(f"clock must return a finite number of seconds, got {now!r}")
        if not now >= self._latest:
            raise ValueError(
                f"clock must not run backwards, got {now} seconds after {self._latest}; give "
                "Dynamic a clock such as time.monotonic"
            )
        self._latest = now
        if not self._times or now - self._times[-1][0] >= self._ttl_seconds / _NUM_MARKS:
            self._epochs[self._next].copy_(last[0])
            self._times.append((now, self._next))
            self._next = (self._next + 1) % len(self._epochs)
        expired = None
        while self._times and now - self._times[0][0] >= self._ttl_seconds:
            _, expired = self._times.popleft()
        if expired is not None:
            self.newest.copy_(self._epochs[expired : expired + 1])

    def forget(self) -> None:
        """Begin anew, since rows came whose times of use are not known: they live from now on."""
        self._times.clear()
        self.newest.zero_()
