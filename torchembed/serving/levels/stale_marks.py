"""A record of the levels that have missed updates, for the next process."""

import hashlib
from collections.abc import Iterable

import torch

from torchembed.stores import RowStore


class StaleMarks:
    """The tables of which a level has missed updates, in a store that outlives the process.

    Args:
        records: that store.
        level: name of the level.
    """

    def __init__(self, records: RowStore, level: str) -> None:
        self._table = records.table(f"torchembed.stale_rows.{level}", 1)

    def tables(self, names: Iterable[str]) -> set[str]:
        """The marked ones of the tables ``names``.

        Raises:
            RowStoreError, OSError: where records cannot be read.
        """
        known = list(names)
        keys = torch.tensor(list(map(_key, known)), dtype=torch.int64)
        found = self._table.read(keys, torch.empty(len(keys), 1, dtype=torch.uint8))
        return {name for name, is_marked in zip(known, found.tolist(), strict=True) if is_marked}

    def add(self, table: str) -> None:
        """Mark a table; raises as :meth:`tables`."""
        self._table.write(torch.tensor([_key(table)]), torch.ones(1, 1, dtype=torch.uint8))

    def remove(self, tables: Iterable[str]) -> None:
        """Mark tables no more; raises as :meth:`tables`."""
        self._table.delete(torch.tensor(sorted(map(_key, tables)), dtype=torch.int64))


def _key(table: str) -> int:
    digest = hashlib.blake2b(table.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
