"""A lock that many threads hold at once to read, and one to write."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class SharedLock:
    """A lock that any number of readers hold together, or one writer alone.

    A writer that waits keeps later readers out, so that it waits for those before it alone.
    Neither side may take it twice.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._num_readers = 0
        self._num_writers_waiting = 0
        self._is_written = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold it beside other readers."""
        with self._changed:
            while self._is_written or self._num_writers_waiting:
                self._changed.wait()
            self._num_readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_readers -= 1
                if not self._num_readers and self._num_writers_waiting:
                    self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold it with no other thread."""
        with self._changed:
            self._num_writers_waiting += 1
            try:
                while self._is_written or self._num_readers:
                    self._changed.wait()
            finally:
                self._num_writers_waiting -= 1
                self._changed.notify_all()
            self._is_written = True
        try:
            yield
        finally:
            with self._changed:
                self._is_written = False
                self._changed.notify_all()
