"""A thread that reads batches ahead of the steps that train them."""

import collections
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from torchembed.step.worker import Worker

_CLOSE_SECONDS = 2.0
"""For the batch that is being read; who reads longer is left behind."""


class ReadingThread:
    """Batches of iterators, one after the other, read by a thread before they are asked for.

    How many were read depends on how many were asked for alone, so that threads of several ranks
    may tell each other of each batch. What reading raises is raised where its batch is asked for.

    Args:
        read: gives the next of an iterator, in the thread; raises StopIteration after the last one.
        num_ahead: batches read and not yet asked for.
    """

    def __init__(self, read: Callable[[Iterator[Any]], Any], num_ahead: int) -> None:
        self._read, self._num_ahead = read, num_ahead
        self._worker: Worker | None = None
        self._source: _Source | None = None
        self._asked: collections.deque[tuple[_Source, Future[Any]]] = collections.deque()

    def follow(self, batches: Iterator[Any]) -> None:
        """Read from ``batches`` once what was read of the one before has been asked for."""
        if self._source is None or self._source.batches is not batches:
            self._source = _Source(self._read, batches)

    def has(self, count: int) -> bool:
        """Whether as many batches are left; waits for them to be read."""
        num_asked = count
        while True:
            self._read_ahead(num_asked)
            ends = [source for source, future in self._asked if _is_end(future)]
            if len(self._asked) - len(ends) >= count:
                return True
            source = self._source
            if source is None or source.has_ended or source in ends:
                return False
            num_asked = len(self._asked) + 1

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while True:
            self._read_ahead(self._num_ahead + 1)
            if not self._asked:
                raise StopIteration
            source, future = self._asked.popleft()
            item = future.result()
            if item is not _END:
                return item
            source.has_ended = True
            self._asked = collections.deque(entry for entry in self._asked if entry[0] != source)

    def _read_ahead(self, count: int) -> None:
        source = self._source
        while source is not None and not source.has_ended and len(self._asked) < count:
            if self._worker is None:
                self._worker = Worker("torchembed: batches to come")
                if self._asked:
                    # The thread before may have been left behind, and comes first.
                    self._worker.submit(self._asked[-1][1].exception)
            self._asked.append((source, self._worker.submit(source.next)))

    def close(self) -> None:
        """End the thread, which another one follows where more is asked for."""
        if self._worker is not None:
            self._worker.close(_CLOSE_SECONDS)
            self._worker = None


class _Source:
    """An iterator that is not asked again once it has ended."""

    def __init__(self, read: Callable[[Iterator[Any]], Any], batches: Iterator[Any]) -> None:
        self._read, self.batches = read, batches
        self.has_ended = False
        """As whoever asks knows."""
        self._is_over = False

    def next(self) -> Any:
        if not self._is_over:
            try:
                return self._read(self.batches)
            except StopIteration:
                self._is_over = True
        return _END


_END = object()


def _is_end(read: "Future[Any]") -> bool:
    return read.exception() is None and read.result() is _END
