"""The interface of stores: tables of lines by key."""

from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from torch import Tensor


class LineChunk(NamedTuple):
    """Some lines of a table.

    Attributes:
        keys: int64 ``[n]``, ascending.
        lines: uint8 ``[n, line_bytes]``.
    """

    keys: Tensor
    lines: Tensor


class RowTable(Protocol):
    """A named table of a store: lines of ``line_bytes`` bytes by signed 64-bit keys.

    Tensors are on the CPU. Keys are int64 ``[n]``, any integers in any order; lines are uint8
    ``[n, line_bytes]``, contiguous (a row of another dtype is one by ``.view(torch.uint8)``).
    Wrong arguments raise ``TypeError`` or ``ValueError`` before anything is done. Any number of
    threads may read and write at once.
    """

    @property
    def name(self) -> str: ...

    @property
    def line_bytes(self) -> int: ...

    def read(self, keys: Tensor, lines: Tensor) -> Tensor:
        """Read the lines of ``keys`` into ``lines``; those of keys without a line stay as they are.

        A key that comes several times is read each time. Each line is read whole. While another
        thread writes, some lines may be of before that call and others of after it. Where reading
        fails, ``lines`` holds nothing of use.

        Returns:
            bool ``[n]``: which keys have a line.
        """
        ...

    def write(self, keys: Tensor, lines: Tensor) -> None:
        """Write ``lines`` under ``keys``, in place of those that were there.

        Of a key that comes several times the last line counts. A call is done whole or not at all,
        also where the process or the machine ends meanwhile. It takes at most 1 GiB of lines.
        """
        ...

    def delete(self, keys: Tensor) -> None:
        """Delete the lines of ``keys``, whole or not at all; keys without a line are left alone."""
        ...

    def chunks(self, max_rows: int) -> Iterator[LineChunk]:
        """All lines in ascending order of their keys, at most ``max_rows`` at a time.

        What another call writes or deletes meanwhile may or may not be among them; all other lines
        come once each. :meth:`RowStore.snapshot` gives what does not change.
        """
        ...

    def num_rows(self) -> int:
        """Number of lines. Stores on disk count them one by one."""
        ...

    def drop(self) -> None:
        """Delete all lines, and have the store let go of the table with all that it keeps of it.

        Nothing may use the table through this object any more; :meth:`RowStore.table` makes it
        anew. In Redis, where other processes may have the table open, its name stays on record.
        """
        ...


class RowStore(Protocol):
    """Named tables of lines by key, in one place.

    A store is a context manager that closes itself. After :meth:`close` everything but another
    ``close`` raises ``RowStoreError``.
    """

    def table(self, name: str, line_bytes: int) -> RowTable:
        """The table ``name``, made where there is none.

        Raises:
            ValueError: where the table has lines of another length.
            RowStoreError: where the store is a snapshot and has no such table.
        """
        ...

    def tables(self) -> dict[str, int]:
        """The ``line_bytes`` of each table, by its name."""
        ...

    def sync(self) -> None:
        """Return when all that was written before survives the end of the machine, not only that of
        the process. In memory nothing survives either."""
        ...

    def snapshot(self) -> "RowStore":
        """A store of all tables as they are now, which cannot be written.

        It neither sees later calls of this store nor delays them. It is closed on its own, before
        this store or after it.
        """
        ...

    def close(self) -> None:
        """Release what the store holds. No other thread may be using it or its tables."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
