"""A table of a store in RocksDB: each line is a value of its own."""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from torchembed.stores.arguments import check_keys, check_lines, check_positive, check_write
from torchembed.stores.errors import CorruptStoreError
from torchembed.stores.interface import LineChunk
from torchembed.stores.rocksdb.database import Database
from torchembed.stores.rocksdb.faults import faults_named
from torchembed.stores.rocksdb.opening import import_rocksdict
from torchembed.stores.rocksdb.table_records import PREFIX_BYTES, prefix

if TYPE_CHECKING:
    import rocksdict

# Signed keys in ascending order are unsigned ones in ascending order of their bytes, with the sign
# reversed.
_SIGN = np.uint64(1 << 63)
_KEY = np.dtype([("table", f">u{PREFIX_BYTES}"), ("key", ">u8")])

# Lines pass through objects of Python in pieces of so many bytes, which processors cache.
_PIECE_BYTES = 1 << 19

_KEYS_AT_ONCE = 1 << 14


class RocksDBTable:
    """Lines by key (:class:`~torchembed.stores.RowTable`) under one prefix of a database's keys."""

    def __init__(self, database: Database, name: str, line_bytes: int) -> None:
        self.name = name
        self.line_bytes = line_bytes
        self._database = database
        self._piece_rows = max(1, _PIECE_BYTES // line_bytes)

    @property
    def _number(self) -> int:
        """The table's number, which changes where the database is replaced by another one."""
        return self._database.record(self.name).number

    def read(self, keys: Tensor, lines: Tensor) -> Tensor:
        check_keys(keys)
        check_lines(lines, keys, self.line_bytes)
        keys_array, lines_array = keys.numpy(), lines.numpy()
        found = np.zeros(len(keys), dtype=np.bool_)
        # Neighbours are in the same blocks, which RocksDB then reads once: three times as fast.
        order = np.argsort(keys_array)
        self._database.check_open()

        def read_piece(places: np.ndarray) -> None:
            with self._database.used() as rows, faults_named(self._database.store):
                values = cast("list[bytes | None]", rows.get(self._encoded(keys_array[places])))
            kept = [value for value in values if value is not None]
            if len(kept) < len(values):
                places = places[[value is not None for value in values]]
            lines_array[places] = self._joined(kept)
            found[places] = True

        # RocksDB reads without Python's global lock, and takes most of the time.
        self._database.for_each(read_piece, list(self._pieces_of(order)))
        return torch.from_numpy(found)

    def write(self, keys: Tensor, lines: Tensor) -> None:
        check_write(keys, lines, self.line_bytes)
        # Stable, so that of lines under one key the last one is written last.
        order = np.argsort(keys.numpy(), kind="stable")
        keys_array, lines_array = keys.numpy(), lines.numpy()

        def fill(batch: "rocksdict.WriteBatch") -> None:
            for places in self._pieces_of(order):
                values = lines_array[places].view(f"V{self.line_bytes}").ravel().tolist()
                _do_all(map(batch.put, self._encoded(keys_array[places]), values))

        self._database.write(fill)

    def delete(self, keys: Tensor) -> None:
        check_keys(keys)
        encoded = self._encoded(keys.numpy())
        self._database.write(lambda batch: _do_all(map(batch.delete, encoded)))

    def chunks(self, max_rows: int) -> Iterator[LineChunk]:
        check_positive("max_rows", max_rows)
        # Here, and not where the first chunk is taken.
        self._database.check_open()
        return self._read_chunks(max_rows)

    def num_rows(self) -> int:
        num_rows, begin = 0, self._first
        while begin is not None:
            keys, begin = self._next("keys", begin, _KEYS_AT_ONCE)
            num_rows += len(keys)
        return num_rows

    def drop(self) -> None:
        self._database.drop_table(self.name)

    def _read_chunks(self, max_rows: int) -> Iterator[LineChunk]:
        begin = self._first
        while begin is not None:
            keys, lines, num_left = [], [], max_rows
            while num_left and begin is not None:
                items, begin = self._next("items", begin, min(num_left, self._piece_rows))
                keys += [key for key, _ in items]
                lines.append(self._joined([line for _, line in items]))
                num_left -= len(items)
            if keys:
                yield LineChunk(self._decoded(keys), torch.from_numpy(np.concatenate(lines)))

    @property
    def _first(self) -> bytes | None:
        """The beginning of the table's keys in the database."""
        return prefix(self._number)

    def _next(self, kind: str, begin: bytes, size: int) -> tuple[list[Any], bytes | None]:
        """Up to ``size`` of what the database's method ``kind`` iterates over from ``begin`` on.

        No iterator lives longer, since it keeps the database open, and old lines on disk. The
        second result is where to go on, None after the table's last key.
        """
        with self._database.used() as rows:
            return self._next_of(rows, kind, begin, size)

    def _next_of(
        self, rows: "rocksdict.Rdict", kind: str, begin: bytes, size: int
    ) -> tuple[list[Any], bytes | None]:
        bounds = import_rocksdict().ReadOptions()
        bounds.set_iterate_upper_bound(prefix(self._number + 1))
        found = list(islice(getattr(rows, kind)(from_key=begin, read_opt=bounds), size))
        if found:
            last = found[-1][0] if kind == "items" else found[-1]
            begin = last + b"\0"
        if len(found) < size:
            # Iterators end where they fail, and do not say so.
            rest = rows.iter(bounds)
            rest.seek(begin)
            if not rest.valid():
                with faults_named(self._database.store):
                    rest.status()
                return found, None
        return found, begin

    def _pieces_of(self, order: np.ndarray) -> Iterator[np.ndarray]:
        for start in range(0, len(order), self._piece_rows):
            yield order[start : start + self._piece_rows]

    def _encoded(self, keys: np.ndarray) -> list[Any]:
        encoded = np.empty(len(keys), dtype=_KEY)
        encoded["table"] = self._number
        encoded["key"] = keys.view(np.uint64) ^ _SIGN
        return encoded.view(f"V{_KEY.itemsize}").tolist()

    def _decoded(self, keys: list[bytes]) -> Tensor:
        encoded = np.frombuffer(b"".join(keys), dtype=_KEY)
        return torch.from_numpy((encoded["key"].astype(np.uint64) ^ _SIGN).view(np.int64))

    def _joined(self, values: list[bytes]) -> np.ndarray:
        lengths = set(map(len, values))
        if lengths - {self.line_bytes}:
            raise CorruptStoreError(
                f"lines of table {self.name!r} in {self._database.store} must have "
                f"{self.line_bytes} bytes, and some have {max(lengths - {self.line_bytes})}; "
                "restore the store from a checkpoint"
            )
        return np.frombuffer(b"".join(values), dtype=np.uint8).reshape(-1, self.line_bytes)


def _do_all(calls: Iterator[None]) -> None:
    """Take everything of ``calls``, without a step of Python for each."""
    deque(calls, maxlen=0)
