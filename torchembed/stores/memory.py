"""A store in the memory of the host."""

from collections.abc import Iterator
from itertools import repeat
from typing import Self

import numpy as np
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

_FIRST_CAPACITY = 64


class MemoryStore(TablesInMemory["_MemoryTable"]):
    """Tables of lines by key (:class:`~torchembed.stores.RowStore`) in the memory of this process.

    A table takes the bytes of its lines, up to twice that after it has grown, and some 150 bytes a
    row for its keys. Nothing survives the process. A snapshot copies all lines.
    """

    def _made_store(self) -> Self:
        return type(self)()

    def _made_table(self, name: str, line_bytes: int) -> "_MemoryTable":
        return _MemoryTable(self, name, line_bytes)

    def _copied_table(self, table: "_MemoryTable", store: Self) -> "_MemoryTable":
        return table._copied_to(store)


class _MemoryTable:
    """Lines in one array, and the row of each key in a dictionary."""

    def __init__(self, store: MemoryStore, name: str, line_bytes: int) -> None:
        self.name = name
        self.line_bytes = line_bytes
        self._store = store
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        """Rows below the highest one in use that deleted keys have left."""
        self._lines = np.empty((0, line_bytes), dtype=np.uint8)

    def read(self, keys: Tensor, lines: Tensor) -> Tensor:
        check_keys(keys)
        check_lines(lines, keys, self.line_bytes)
        with self._store._lock:
            self._store._check_table(self)
            rows = np.array(list(map(self._rows.get, keys.tolist(), repeat(-1))), dtype=np.int64)
            found = rows >= 0
            if found.all():
                np.take(self._lines, rows, axis=0, out=lines.numpy(), mode="clip")
            else:
                lines.numpy()[found] = self._lines[rows[found]]
        return torch.from_numpy(found)

    def write(self, keys: Tensor, lines: Tensor) -> None:
        check_write(keys, lines, self.line_bytes)
        places = last_places(keys.numpy())
        with self._store._lock:
            self._store._check_table_writable(self)
            rows = self._rows_for(keys[places].tolist())
            self._lines[rows] = lines.numpy()[places]

    def delete(self, keys: Tensor) -> None:
        check_keys(keys)
        with self._store._lock:
            self._store._check_table_writable(self)
            for key in keys.tolist():
                row = self._rows.pop(key, None)
                if row is not None:
                    self._free.append(row)

    def chunks(self, max_rows: int) -> Iterator[LineChunk]:
        check_positive("max_rows", max_rows)
        with self._store._lock:
            self._store._check_table(self)
            keys = torch.tensor(sorted(self._rows), dtype=torch.int64)
        return self._read_chunks(keys.split(max_rows))

    def num_rows(self) -> int:
        with self._store._lock:
            self._store._check_table(self)
            return len(self._rows)

    def drop(self) -> None:
        self._store._drop(self)

    def _read_chunks(self, pieces: tuple[Tensor, ...]) -> Iterator[LineChunk]:
        for keys in pieces:
            lines = torch.empty(len(keys), self.line_bytes, dtype=torch.uint8)
            found = self.read(keys, lines)
            if found.any():
                yield LineChunk(keys[found], lines[found])

    def _rows_for(self, keys: list[int]) -> list[int]:
        """The row of each key, one that was free for those that had none."""
        missing = [key for key in keys if key not in self._rows]
        end = len(self._rows) + len(self._free)
        num_new = max(0, len(missing) - len(self._free))
        if end + num_new > len(self._lines):
            # Grown before any key has a row in it, since memory may not suffice.
            capacity = max(end + num_new, 2 * len(self._lines), _FIRST_CAPACITY)
            grown = np.empty((capacity, self.line_bytes), dtype=np.uint8)
            grown[:end] = self._lines[:end]
            self._lines = grown
        num_free = len(missing) - num_new
        taken = [self._free.pop() for _ in range(num_free)]
        self._rows.update(zip(missing, (*taken, *range(end, end + num_new)), strict=True))
        return [self._rows[key] for key in keys]

    def _copied_to(self, store: MemoryStore) -> "_MemoryTable":
        copied = _MemoryTable(store, self.name, self.line_bytes)
        copied._rows = self._rows.copy()
        copied._free = self._free.copy()
        copied._lines = self._lines[: len(self._rows) + len(self._free)].copy()
        return copied
