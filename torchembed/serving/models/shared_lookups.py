"""Lookups of the tables of all loaded versions, shared by those that share tables."""

import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from torchembed.serving.levels import LeveledLookup, ServedTable

LookupFactory: TypeAlias = Callable[[Mapping[ServedTable, int]], LeveledLookup]
"""Makes the lookup of some tables, given with their numbers of rows; its stores stay the caller's.
"""


class _Use(NamedTuple):
    lookup: LeveledLookup
    tables: tuple[ServedTable, ...]
    users: list[object]


class SharedLookups:
    """One lookup for each served table, however many versions use it; closed with its last user."""

    def __init__(self) -> None:
        self._uses: list[_Use] = []
        self._lock = threading.Lock()

    def take(
        self, user: object, tables: Mapping[ServedTable, int], make: LookupFactory
    ) -> dict[str, LeveledLookup]:
        """The lookup of each of ``tables``, by its name; one is made for those that have none yet.

        Args:
            user: that :meth:`release` is called with.
            tables: with their numbers of rows.

        Raises:
            ValueError: for a table whose name is served in another form.
        """
        with self._lock:
            served = {t.name: (t, use) for use in self._uses for t in use.tables}
            for table in tables:
                known = served.get(table.name, (table, None))[0]
                if known != table:
                    raise ValueError(
                        f"table {table.name!r} must be as the loaded models have it, {known}, got "
                        f"{table}; serve rows by version, or deploy it under another store name"
                    )
            new = {t: num_rows for t, num_rows in tables.items() if t.name not in served}
            if new:
                use = _Use(make(new), tuple(new), [])
                self._uses.append(use)
                served |= {table.name: (table, use) for table in new}
            found = {table.name: served[table.name][1] for table in tables}
            for use in {id(use): use for use in found.values()}.values():
                use.users.append(user)
            return {name: use.lookup for name, use in found.items()}

    def release(self, user: object) -> None:
        """Let go of what ``user`` took."""
        with self._lock:
            for use in list(self._uses):
                use.users[:] = [other for other in use.users if other is not user]
                if not use.users:
                    self._uses.remove(use)
                    use.lookup.close()

    def is_shared(self, user: object, table: str) -> bool:
        """Whether others than ``user`` use the lookup of a table, given by its name in stores."""
        with self._lock:
            return any(
                other is not user
                for use in self._uses
                if table in (served.name for served in use.tables)
                for other in use.users
            )

    def lookups(self) -> dict[str, LeveledLookup]:
        """The lookup of each table by its name in stores."""
        with self._lock:
            return {table.name: use.lookup for use in self._uses for table in use.tables}
