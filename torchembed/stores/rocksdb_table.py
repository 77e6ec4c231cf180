"""A table of a store in RocksDB: each line is a value of its own."""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from torchembed.stores.arguments import check_keys, check_lines, check_positive, check_write
from torchembed.stores.errors import CorruptStoreError
from torchembed.stores.interface import LineChunk
from torchembed.stores.rocksdb_database import PREFIX_BYTES, Database, import_rocksdict, prefix
from torchembed.stores.rocksdb_faults import faults_named

# Signed keys in ascending order are unsigned ones in ascending order of their bytes, with the sign
# reversed.
_SIGN = np.uint64(1 << 63)
_KEY = np.dtype([("table", f">u{PREFIX_BYTES}"), ("key", ">u8")])

# Lines are read in pieces of so many bytes, since a piece takes that three times over.
_PIECE_BYTES = 16 << 20


class RocksDBTable:
    """Lines by key (:class:`~torchembed.stores.RowTable`) under one prefix of a database's keys."""

    def __init__(self, database: Database, name: str, line_bytes: int, number: int) -> None:
        self.name = name
        self.line_bytes = line_bytes
        self._database = database
        self._number = number

    def read(self, keys: Tensor, lines: Tensor) -> Tensor:
        check_keys(keys)
        check_lines(lines, keys, self.line_bytes)
        rows = self._database.rows
        keys_array, lines_array = keys.numpy(), lines.numpy()
        found = np.zeros(len(keys), dtype=np.bool_)
        # Neighbours are in the same blocks, which RocksDB then reads once: three times as fast.
        order = np.argsort(keys_array)
        num_rows = max(1, _PIECE_BYTES // self.line_bytes)
        for start in range(0, len(order), num_rows):
            places = order[start : start + num_rows]
            with faults_named(self._database.folder):
                values = cast("list[bytes | None]", rows.get(self._encoded(keys_array[places])))
            kept = [value for value in values if value is not None]
            if len(kept) < len(values):
                places = places[[value is not None for value in values]]
            lines_array[places] = self._joined(kept)
            found[places] = True
        return torch.from_numpy(found)

    def write(self, keys: Tensor, lines: Tensor) -> None:
        check_write(keys, lines, self.line_bytes)
        # Stable, so that of lines under one key the last one is written last.
        order = np.argsort(keys.numpy(), kind="stable")
        values = lines.numpy()[order].view(f"V{self.line_bytes}").ravel().tolist()
        encoded = self._encoded(keys.numpy()[order])
        self._database.write(lambda batch: _do_all(map(batch.put, encoded, values)))

    def delete(self, keys: Tensor) -> None:
        check_keys(keys)
        encoded = self._encoded(keys.numpy())
        self._database.write(lambda batch: _do_all(map(batch.delete, encoded)))

    def chunks(self, max_rows: int) -> Iterator[LineChunk]:
        check_positive("max_rows", max_rows)
        # A closed store raises here, and not where the first chunk is taken.
        _ = self._database.rows
        return self._read_chunks(max_rows)

    def num_rows(self) -> int:
        return sum(len(keys) for keys in self._read_keys())

    def _read_chunks(self, max_rows: int) -> Iterator[LineChunk]:
        for items in self._pieces("items", max_rows):
            keys, values = zip(*items, strict=True)
            lines = self._joined(values).copy()
            yield LineChunk(self._decoded(keys), torch.from_numpy(lines))

    def _read_keys(self) -> Iterator[list[bytes]]:
        return self._pieces("keys", 1 << 16)

    def _pieces(self, kind: str, size: int) -> Iterator[list]:
        """What the database's method ``kind`` iterates over of this table, ``size`` at a time.

        An iterator lives for a piece alone: it keeps the database open, and old lines on disk.
        """
        begin, end = prefix(self._number), prefix(self._number + 1)
        bounds = import_rocksdict().ReadOptions()
        bounds.set_iterate_upper_bound(end)
        while True:
            rows = self._database.rows
            found = list(islice(getattr(rows, kind)(from_key=begin, read_opt=bounds), size))
            if found:
                last = found[-1][0] if kind == "items" else found[-1]
                begin = last + b"\0"
                yield found
            if len(found) < size:
                # Iterators end where they fail, and do not say so.
                rest = rows.iter(bounds)
                rest.seek(begin)
                if not rest.valid():
                    with faults_named(self._database.folder):
                        rest.status()
                    return
                del rest

    def _encoded(self, keys: np.ndarray) -> list[Any]:
        encoded = np.empty(len(keys), dtype=_KEY)
        encoded["table"] = self._number
        encoded["key"] = keys.view(np.uint64) ^ _SIGN
        return encoded.view(f"V{_KEY.itemsize}").tolist()

    def _decoded(self, keys: tuple[bytes, ...]) -> Tensor:
        encoded = np.frombuffer(b"".join(keys), dtype=_KEY)
        return torch.from_numpy((encoded["key"].astype(np.uint64) ^ _SIGN).view(np.int64))

    def _joined(self, values: list[bytes] | tuple[bytes, ...]) -> np.ndarray:
        lengths = set(map(len, values))
        if lengths - {self.line_bytes}:
            raise CorruptStoreError(
                f"lines of table {self.name!r} in {self._database.folder} must have "
                f"{self.line_bytes} bytes, and some have {max(lengths - {self.line_bytes})}; "
                "restore the store from a checkpoint"
            )
        return np.frombuffer(b"".join(values), dtype=np.uint8).reshape(-1, self.line_bytes)


def _do_all(calls: Iterator[None]) -> None:
    """Take everything of ``calls``, without a step of Python for each."""
    deque(calls, maxlen=0)
