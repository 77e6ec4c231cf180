"""A store of a bounded number of rows in the memory of the host."""

import itertools
import threading
from collections.abc import Iterator
from typing import NamedTuple, Self

import torch
from torch import Tensor

from torchembed.stores.arguments import (
    check_keys,
    check_lines,
    check_positive,
    check_write,
)
from torchembed.stores.interface import LineChunk
from torchembed.stores.last_places import last_places
from torchembed.stores.tables_in_memory import TablesInMemory
from torchembed.stores.volatile.access_refresher import AccessRefresher
from torchembed.stores.volatile.bounded_rows import BoundedRows, FoundRows
from torchembed.stores.volatile.options import VolatileOptions
from torchembed.stores.volatile.shared_lock import SharedLock


class VolatileMemoryStore(TablesInMemory["_VolatileMemoryTable"]):
    """Tables of lines by key (:class:`~torchembed.stores.RowStore`) in the memory of this process,
    each partition of a table of at most ``overflow_margin_rows``.

    Any number of threads read at once. A call of ``write`` is done in batches of
    ``max_batch_rows``; after each one a partition with too many rows keeps exactly
    ``overflow_resolution_target`` of them. When and how often rows were read is noted by a thread
    behind the readers; :meth:`sync` and :meth:`close` wait for it.

    A table takes the memory that :func:`~torchembed.stores.volatile_memory_bytes` says. A snapshot
    copies all lines.

    Args:
        options: how tables are bounded; by default they are not.
    """

    def __init__(self, options: VolatileOptions | None = None) -> None:
        super().__init__()
        self.options = options or VolatileOptions()
        self._refresher: AccessRefresher[_Read] = AccessRefresher("torchembed accesses to memory")
        self.num_evicted_rows = 0
        """Rows of all tables that left partitions with too many."""
        self._counting = threading.Lock()

    @property
    def num_lost_accesses(self) -> int:
        """Keys whose reads were not noted, since too many waited to be."""
        return self._refresher.num_lost_keys

    def sync(self) -> None:
        """Return when all reads before are noted. Nothing survives the process."""
        self._check_open()
        self._refresher.flush()

    def close(self) -> None:
        """Release the memory, with all rows."""
        try:
            self._refresher.close()
        finally:
            super().close()

    def _count_evicted(self, num_rows: int) -> None:
        with self._counting:
            self.num_evicted_rows += num_rows

    def _made_store(self) -> Self:
        return type(self)(self.options)

    def _made_table(self, name: str, line_bytes: int) -> "_VolatileMemoryTable":
        return _VolatileMemoryTable(self, name, line_bytes, BoundedRows(line_bytes, self.options))

    def _copied_table(self, table: "_VolatileMemoryTable", store: Self) -> "_VolatileMemoryTable":
        return table._copied_to(store)


class _Read(NamedTuple):
    """A read that is to be noted."""

    found: FoundRows
    num_moves: int
    epoch: int


class _VolatileMemoryTable:
    """Lines by key (:class:`~torchembed.stores.RowTable`) in bounded memory."""

    def __init__(
        self, store: VolatileMemoryStore, name: str, line_bytes: int, rows: BoundedRows
    ) -> None:
        self.name = name
        self.line_bytes = line_bytes
        self._store = store
        self._rows = rows
        self._lock = SharedLock()
        self._epochs = itertools.count(1)
        """Reads and batches of writes in their order, which is their time."""
        self._notes = store.options.notes_accesses

    def read(self, keys: Tensor, lines: Tensor) -> Tensor:
        return self._read(keys, lines, is_noted=self._notes and not self._store._is_snapshot)

    def write(self, keys: Tensor, lines: Tensor) -> None:
        check_write(keys, lines, self.line_bytes)
        places = last_places(keys.numpy())
        keys, lines_array = keys[places], lines.numpy()[places]
        max_rows = self._store.options.max_batch_rows
        # Once also for no keys, so that it is known whether the store may be written.
        for begin in range(0, max(len(keys), 1), max_rows):
            batch = slice(begin, begin + max_rows)
            with self._lock.alone():
                self._store._check_table_writable(self)
                self._rows.write(keys[batch], lines_array[batch], next(self._epochs))
                num_evicted = self._rows.resolve_overflows()
            self._store._count_evicted(num_evicted)

    def delete(self, keys: Tensor) -> None:
        check_keys(keys)
        with self._lock.alone():
            self._store._check_table_writable(self)
            self._rows.delete(keys)

    def chunks(self, max_rows: int) -> Iterator[LineChunk]:
        check_positive("max_rows", max_rows)
        with self._lock.shared():
            self._store._check_table(self)
            keys = self._rows.keys()
        return self._read_chunks(keys.split(max_rows))

    def num_rows(self) -> int:
        with self._lock.shared():
            self._store._check_table(self)
            return len(self._rows)

    def drop(self) -> None:
        self._store._drop(self)

    def note_reads(self, reads: list[_Read]) -> None:
        """Note reads; for the refresher's thread alone, beside which nobody else does."""
        with self._lock.shared():
            for read in reads:
                self._rows.note(*read)

    def _read(self, keys: Tensor, lines: Tensor, *, is_noted: bool) -> Tensor:
        check_keys(keys)
        check_lines(lines, keys, self.line_bytes)
        # Found once, and noted later, when the caller may have changed them.
        keys = keys.clone() if is_noted else keys
        with self._lock.shared():
            self._store._check_table(self)
            found = self._rows.find(keys)
            is_found = self._rows.read(found, lines.numpy())
            read = _Read(found, self._rows.num_moves, next(self._epochs))
        if is_noted:
            self._store._refresher.add(self, read, len(keys))
        return is_found

    def _read_chunks(self, pieces: tuple[Tensor, ...]) -> Iterator[LineChunk]:
        for keys in pieces:
            lines = torch.empty(len(keys), self.line_bytes, dtype=torch.uint8)
            found = self._read(keys, lines, is_noted=False)
            if found.any():
                yield LineChunk(keys[found], lines[found])

    def _copied_to(self, store: VolatileMemoryStore) -> "_VolatileMemoryTable":
        with self._lock.shared():
            return _VolatileMemoryTable(store, self.name, self.line_bytes, self._rows.copied())
