"""Batches read by a background thread, in lockstep on all ranks."""

import collections
import enum
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Generic, TypeVar

from torchembed.step.batches.worker import Worker

_CLOSE_SECONDS = 2.0
"""Longest that closing waits for the batch being read; then the thread is abandoned."""

G = TypeVar("G")
"""Items that iterators give."""
R = TypeVar("R")
"""Results of reading them."""


class ReadingThread(Generic[G, R]):
    """Iterates over the batches of one iterator after another, which a thread reads ahead.

    How many batches were read depends only on how many were asked for, so ``read`` may be
    collective: every rank reads the same number. :class:`~torchembed.data.loader.BackgroundLoader`
    reads as fast as its consumer frees places, on several threads, and so differs between ranks.
    What reading raises is raised where its batch is asked for.

    Args:
        read: reads the next batch of an iterator, in the thread; raises StopIteration at its end.
        num_ahead: batches to read before they are asked for.
    """

    def __init__(self, read: Callable[[Iterator[G]], R], num_ahead: int) -> None:
        self._read, self._num_ahead = read, num_ahead
        self._worker: Worker | None = None
        self._source: _Source[G, R] | None = None
        self._asked: collections.deque[tuple[_Source[G, R], Future[R | _End]]] = collections.deque()

    def follow(self, batches: Iterator[G]) -> None:
        """Read from ``batches`` from now on. Batches read from another iterator come first."""
        if self._source is None or self._source.batches is not batches:
            self._source = _Source(self._read, batches)

    def has(self, count: int) -> bool:
        """True where at least ``count`` batches are left; waits for them to be read."""
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

    def __iter__(self) -> Iterator[R]:
        return self

    def __next__(self) -> R:
        while True:
            self._read_ahead(self._num_ahead + 1)
            if not self._asked:
                raise StopIteration
            source, future = self._asked.popleft()
            item = future.result()
            if not isinstance(item, _End):
                return item
            source.has_ended = True
            self._asked = collections.deque(entry for entry in self._asked if entry[0] != source)

    def _read_ahead(self, count: int) -> None:
        source = self._source
        while source is not None and not source.has_ended and len(self._asked) < count:
            if self._worker is None:
                self._worker = Worker("torchembed: batches to come")
                if self._asked:
                    # A thread that was abandoned may still read: the new one waits for it first.
                    self._worker.submit(self._asked[-1][1].exception)
            self._asked.append((source, self._worker.submit(source.next)))

    def drop(self) -> None:
        """Forget the iterator and the batches read of it; waits for those that were asked for."""
        for _, future in self._asked:
            future.exception()
        self._asked.clear()
        self._source = None

    def close(self) -> None:
        """End the thread. A new one is started where more batches are asked for."""
        if self._worker is not None:
            self._worker.close(_CLOSE_SECONDS)
            self._worker = None


class _End(enum.Enum):
    """Read after the last batch."""

    END = enum.auto()


class _Source(Generic[G, R]):
    """An iterator that is not read again once it has ended."""

    def __init__(self, read: Callable[[Iterator[G]], R], batches: Iterator[G]) -> None:
        self._read, self.batches = read, batches
        self.has_ended = False
        """True once its end was asked for; ``_is_over`` is true once the thread has seen it."""
        self._is_over = False

    def next(self) -> R | _End:
        if not self._is_over:
            try:
                return self._read(self.batches)
            except StopIteration:
                self._is_over = True
        return _End.END


def _is_end(read: Future[R | _End]) -> bool:
    return read.exception() is None and read.result() is _End.END
