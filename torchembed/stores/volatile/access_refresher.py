"""A thread that notes when and how often rows were read, behind the readers."""

import threading
import weakref
from collections import deque
from typing import Generic, Protocol, TypeVar

from torchembed.stores.errors import RowStoreError

MAX_WAITING_KEYS = 1 << 22
"""Most keys that wait for the thread, 8 bytes and more each. Those of later reads are lost."""

Read = TypeVar("Read")


class NotingTable(Protocol[Read]):
    """A table that notes reads."""

    def note_reads(self, reads: list[Read]) -> None:
        """Note ``reads``, in the order in which they were made."""
        ...


class _Waiting(Generic[Read]):
    """State that the thread and those who wake it share. It outlives the refresher by the
    thread's end alone."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.reads: deque[tuple[NotingTable[Read], Read, int]] = deque()
        self.num_keys = 0
        self.num_lost_keys = 0
        self.is_noting = False
        self.is_closed = False
        self.failure: Exception | None = None

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()


class AccessRefresher(Generic[Read]):
    """Passes reads to their tables' ``note_reads`` in a thread of its own, all that wait at once.

    The thread starts with the first read and ends with :meth:`close`, or with this object.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: _Waiting[Read] = _Waiting()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._waiting.close)

    @property
    def num_lost_keys(self) -> int:
        """Keys whose reads were not noted, since too many waited, or the store was away."""
        return self._waiting.num_lost_keys

    def add(self, table: NotingTable[Read], read: Read, num_keys: int) -> None:
        """Have ``table`` note ``read``, which is of ``num_keys`` keys, soon."""
        waiting = self._waiting
        with waiting.changed:
            if waiting.is_closed or waiting.num_keys + num_keys > MAX_WAITING_KEYS:
                waiting.num_lost_keys += num_keys
                return
            waiting.reads.append((table, read, num_keys))
            waiting.num_keys += num_keys
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_note_all, args=(waiting,), name=self._name, daemon=True
                )
                self._thread.start()
            waiting.changed.notify_all()

    def flush(self) -> None:
        """Return when all reads that were added before are noted, or lost.

        Raises:
            Exception: with which noting failed since the last call, but for stores that are away.
        """
        waiting = self._waiting
        with waiting.changed:
            while waiting.reads or waiting.is_noting:
                waiting.changed.wait()
            failure, waiting.failure = waiting.failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Note what waits, and end the thread. Raises as :meth:`flush` does."""
        try:
            self.flush()
        finally:
            self._waiting.close()
            if self._thread is not None:
                self._thread.join()


def _note_all(waiting: _Waiting[Read]) -> None:
    while True:
        with waiting.changed:
            while not waiting.reads and not waiting.is_closed:
                waiting.changed.wait()
            if not waiting.reads:
                return
            reads = list(waiting.reads)
            waiting.reads.clear()
            waiting.num_keys = 0
            waiting.is_noting = True
        num_lost, failure = _note(reads)
        # Neither this list nor its loop's variables may keep tables alive while the thread waits.
        del reads
        with waiting.changed:
            waiting.is_noting = False
            waiting.num_lost_keys += num_lost
            waiting.failure = waiting.failure or failure
            waiting.changed.notify_all()


def _note(reads: list[tuple[NotingTable[Read], Read, int]]) -> tuple[int, Exception | None]:
    """Note reads; how many keys were lost, and with what it failed."""
    by_table: dict[int, tuple[NotingTable[Read], list[Read], int]] = {}
    for table, read, num_keys in reads:
        _, of_table, num_before = by_table.setdefault(id(table), (table, [], 0))
        of_table.append(read)
        by_table[id(table)] = (table, of_table, num_before + num_keys)
    num_lost, failure = 0, None
    for table, of_table, num_keys in by_table.values():
        try:
            table.note_reads(of_table)
        except RowStoreError:
            num_lost += num_keys
        except Exception as error:  # noqa: BLE001 - raised by flush
            num_lost += num_keys
            failure = error
    return num_lost, failure
