"""A store in the memory of the host."""

import threading
from collections.abc import Iterator
from itertools import repeat
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from torchembed.stores.arguments import (
    check_keys,
    check_lines,
    check_positive,
    check_same_line,
    check_table,
    check_write,
)
from torchembed.stores.errors import RowStoreError
from torchembed.stores.interface import LineChunk

_FIRST_CAPACITY = 64


class MemoryStore:
    """Tables of lines by key (:class:`~torchembed.stores.RowStore`) in the memory of this process.

    A table takes the bytes of its lines, up to twice that after it has grown, and some 150 bytes a
    row for its keys. Nothing survives the process. A snapshot copies all lines.
    """

    def __init__(self) -> None:
        self._tables: dict[str, _MemoryTable] = {}
        self._is_snapshot = False
        self._is_open = True
        # Held by every call on the store and its tables: none takes long.
        self._lock = threading.RLock()

    def table(self, name: str, line_bytes: int) -> "_MemoryTable":
        check_table(name, line_bytes)
        with self._lock:
            self._check_open()
            table = self._tables.get(name)
            if table is None:
                self._check_writable()
                table = self._tables[name] = _MemoryTable(self, name, line_bytes)
            check_same_line("this store", name, table.line_bytes, line_bytes)
            return table

    def tables(self) -> dict[str, int]:
        with self._lock:
            self._check_open()
            return {name: table.line_bytes for name, table in self._tables.items()}

    def sync(self) -> None:
        self._check_open()

    def snapshot(self) -> "MemoryStore":
        with self._lock:
            self._check_open()
            copied = MemoryStore()
            copied._tables = {
                name: table._copied_to(copied) for name, table in self._tables.items()
            }
            copied._is_snapshot = True
            return copied

    def close(self) -> None:
        with self._lock:
            self._is_open = False
            self._tables.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._is_open:
            raise RowStoreError("this store in memory is closed; make another one")

    def _check_writable(self) -> None:
        self._check_open()
        if self._is_snapshot:
            raise RowStoreError("a snapshot cannot be written; write to the store it was taken of")


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
            self._store._check_open()
            rows = np.array(list(map(self._rows.get, keys.tolist(), repeat(-1))), dtype=np.int64)
            found = rows >= 0
            if found.all():
                np.take(self._lines, rows, axis=0, out=lines.numpy(), mode="clip")
            else:
                lines.numpy()[found] = self._lines[rows[found]]
        return torch.from_numpy(found)

    def write(self, keys: Tensor, lines: Tensor) -> None:
        check_write(keys, lines, self.line_bytes)
        # The last place of each key.
        places = dict(zip(keys.tolist(), range(len(keys)), strict=True))
        with self._store._lock:
            self._store._check_writable()
            rows = self._rows_for(list(places))
            self._lines[rows] = lines.numpy()[list(places.values())]

    def delete(self, keys: Tensor) -> None:
        check_keys(keys)
        with self._store._lock:
            self._store._check_writable()
            for key in keys.tolist():
                row = self._rows.pop(key, None)
                if row is not None:
                    self._free.append(row)

    def chunks(self, max_rows: int) -> Iterator[LineChunk]:
        check_positive("max_rows", max_rows)
        with self._store._lock:
            self._store._check_open()
            keys = torch.tensor(sorted(self._rows), dtype=torch.int64)
        return self._read_chunks(keys.split(max_rows))

    def num_rows(self) -> int:
        with self._store._lock:
            self._store._check_open()
            return len(self._rows)

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
