"""The keys that a level of rows has missed updates of."""

from collections.abc import Iterable
from typing import NamedTuple


class Missed(NamedTuple):
    """Rows that a level has to delete before it is read again."""

    keys: dict[str, set[int]]
    """Keys of rows, by the name of their table."""
    whole: set[str]
    """Names of tables of which all rows are to be deleted."""


class MissedKeys:
    """The keys that a level has missed updates of, also while it is asked to delete their rows.

    Whoever calls a method holds the lock of the level.

    Args:
        max_keys: the most keys that are remembered. Where there are more, all rows of their tables
            are to be deleted.
        whole: tables of which all rows are to be deleted from the beginning.
    """

    def __init__(self, max_keys: int, whole: Iterable[str] = ()) -> None:
        self._max_keys = max_keys
        self._noted = Missed({}, set(whole))
        self._deleting = Missed({}, set())
        """Keys that were taken, until it is settled whether their rows are deleted."""

    def __bool__(self) -> bool:
        return any((*self._noted, *self._deleting))

    @property
    def num_keys(self) -> int:
        """How many keys there are; -1 where whole tables are among what was missed."""
        if self._noted.whole or self._deleting.whole:
            return -1
        noted, deleting = self._noted.keys, self._deleting.keys
        return sum(len(noted.get(t, set()) | deleting.get(t, set())) for t in {*noted, *deleting})

    def add(self, table: str, keys: Iterable[int]) -> None:
        """Note keys of which updates were missed."""
        self._noted.keys.setdefault(table, set()).update(keys)
        if sum(map(len, self._noted.keys.values())) > self._max_keys:
            self._noted = Missed({}, self._noted.whole | self._noted.keys.keys())

    def take(self) -> Missed:
        """All that was noted, for its rows to be deleted; :meth:`settle` follows."""
        self._deleting, self._noted = self._noted, Missed({}, set())
        return self._deleting

    def settle(self, *, is_deleted: bool) -> None:
        """Forget what was taken where its rows are deleted, and note it again where they are
        not."""
        taken, self._deleting = self._deleting, Missed({}, set())
        if not is_deleted:
            for table, keys in taken.keys.items():
                self._noted.keys.setdefault(table, set()).update(keys)
            self._noted.whole.update(taken.whole)
