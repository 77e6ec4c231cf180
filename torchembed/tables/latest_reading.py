"""Counters read again and again, without waiting for a GPU."""

import collections
from typing import Generic, Protocol, Self, TypeVar

K = TypeVar("K")
V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True)


class Reading(Protocol[K, V]):
    """A copy of counters to the host that was begun."""

    @property
    def has_arrived(self) -> bool:
        """True once :meth:`result` no longer waits."""
        ...

    def result(self) -> dict[K, V]:
        """The counts by name; waits for the copy."""
        ...


class LatestReading(Generic[K, V]):
    """The result of the last reading that arrived, of those begun one after the other."""

    def __init__(self) -> None:
        self._under_way: collections.deque[Reading[K, V]] = collections.deque()
        self._latest: dict[K, V] = {}

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        """Copies and pickles have read nothing yet."""
        return type(self), ()

    def after(self, begun: Reading[K, V], *, wait: bool) -> dict[K, V]:
        """The result that arrived last, once ``begun`` is under way too; that of ``begun`` where
        ``wait`` is True."""
        self._under_way.append(begun)
        while self._under_way and (wait or self._under_way[0].has_arrived):
            self._latest = self._under_way.popleft().result()
        return dict(self._latest)
