"""A table of a store that reads when it is told to."""

import threading
from collections.abc import Iterator

from torch import Tensor

from torchembed.stores import LineChunk, RowTable

_SECONDS = 60.0


class GatedTable:
    """``table``, whose reads by other threads than the one that made it wait at a gate.

    Attributes:
        error: raised by these reads once they are through, instead of what they found; once.
        reads: the keys of each of them.
    """

    def __init__(self, table: RowTable) -> None:
        self._table, self._maker = table, threading.get_ident()
        self._arrived, self._opened = threading.Semaphore(0), threading.Semaphore(0)
        self.error: Exception | None = None
        self.reads: list[list[int]] = []

    @property
    def name(self) -> str:
        return self._table.name

    @property
    def line_bytes(self) -> int:
        return self._table.line_bytes

    def arrived(self) -> None:
        """Wait until a read has found its lines, and waits at the gate with them."""
        assert self._arrived.acquire(timeout=_SECONDS)

    def open(self, num_reads: int = 1) -> None:
        """Let so many reads through."""
        self._opened.release(num_reads)

    def read(self, keys: Tensor, lines: Tensor) -> Tensor:
        found = self._table.read(keys, lines)
        if threading.get_ident() == self._maker:
            return found
        self.reads.append(keys.tolist())
        self._arrived.release()
        assert self._opened.acquire(timeout=_SECONDS)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return found

    def write(self, keys: Tensor, lines: Tensor) -> None:
        self._table.write(keys, lines)

    def delete(self, keys: Tensor) -> None:
        self._table.delete(keys)

    def chunks(self, max_rows: int) -> Iterator[LineChunk]:
        return self._table.chunks(max_rows)

    def num_rows(self) -> int:
        return self._table.num_rows()

    def drop(self) -> None:
        self._table.drop()
