"""The base of stores in the memory of a process: named tables, and being closed."""

import threading
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from torchembed.stores.arguments import check_same_line, check_table
from torchembed.stores.errors import RowStoreError


class TableInMemory(Protocol):
    """A table that :class:`TablesInMemory` holds."""

    @property
    def name(self) -> str: ...

    @property
    def line_bytes(self) -> int: ...


Table = TypeVar("Table", bound=TableInMemory)


class TablesInMemory(Generic[Table]):
    """Named tables in the memory of this process. Kinds of stores say how one is made, and how a
    store and a table are copied."""

    def __init__(self) -> None:
        self._tables: dict[str, Table] = {}
        self._is_snapshot = False
        self._is_open = True
        # Tables may hold it, too: no call takes long.
        self._lock = threading.RLock()

    def table(self, name: str, line_bytes: int) -> Table:
        check_table(name, line_bytes)
        with self._lock:
            self._check_open()
            table = self._tables.get(name)
            if table is None:
                self._check_writable()
                table = self._tables[name] = self._made_table(name, line_bytes)
            check_same_line("this store", name, table.line_bytes, line_bytes)
            return table

    def tables(self) -> dict[str, int]:
        with self._lock:
            self._check_open()
            return {name: table.line_bytes for name, table in self._tables.items()}

    def sync(self) -> None:
        self._check_open()

    def snapshot(self) -> Self:
        with self._lock:
            self._check_open()
            copied = self._made_store()
            copied._tables = {
                name: self._copied_table(table, copied) for name, table in self._tables.items()
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

    def _made_store(self) -> Self:
        """A store of this kind without tables."""
        raise NotImplementedError

    def _made_table(self, name: str, line_bytes: int) -> Table:
        """A table of this store without lines."""
        raise NotImplementedError

    def _copied_table(self, table: Table, store: Self) -> Table:
        """A table of ``store`` with the lines of ``table``."""
        raise NotImplementedError

    def _drop(self, table: Table) -> None:
        """Let go of a table; its memory ends with the last object that holds it."""
        with self._lock:
            self._check_table_writable(table)
            del self._tables[table.name]

    def _check_table(self, table: Table) -> None:
        """Raise ``RowStoreError`` where a table can no longer be read."""
        self._check_open()
        if self._tables.get(table.name) is not table:
            raise RowStoreError(f"table {table.name!r} was dropped; open it again by table()")

    def _check_table_writable(self, table: Table) -> None:
        """Raise ``RowStoreError`` where a table cannot be written."""
        self._check_writable()
        self._check_table(table)

    def _check_open(self) -> None:
        if not self._is_open:
            raise RowStoreError("this store in memory is closed; make another one")

    def _check_writable(self) -> None:
        self._check_open()
        if self._is_snapshot:
            raise RowStoreError("a snapshot cannot be written; write to the store it was taken of")
