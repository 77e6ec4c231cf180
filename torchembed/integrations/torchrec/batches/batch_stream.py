"""``BatchStream``: batches that a thread reads ahead, and those that steps give back unused."""

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator

from torchembed.core.trees import Tree
from torchembed.integrations.torchrec.batches.conversion import ReadItem, TorchrecBatchForm
from torchembed.step.batches.reading_thread import ReadingThread

_NUM_READ_AHEAD = 2
"""Batches read ahead, more than the two that steps on a GPU are ahead."""


class BatchStream:
    """Iterates over the batches of one iterator after another, which a thread reads ahead.

    Args:
        read: reads the next batch of an iterator, in the thread; raises StopIteration at its end.
    """

    def __init__(self, read: Callable[[Iterator[Tree]], ReadItem]) -> None:
        self._thread = ReadingThread(read, _NUM_READ_AHEAD)
        self._given_back: collections.deque[ReadItem] = collections.deque()
        self._is_paused = False

    def follow(self, batches: Iterator[Tree]) -> None:
        """Read from ``batches`` from now on. Batches read from another iterator come first."""
        self._thread.follow(batches)

    def has(self, count: int) -> bool:
        """True where at least ``count`` batches are left; waits for them to be read."""
        return self._thread.has(count - len(self._given_back))

    def __iter__(self) -> Iterator[ReadItem]:
        return self

    def __next__(self) -> ReadItem:
        if self._is_paused:
            raise StopIteration
        return self._given_back.popleft() if self._given_back else next(self._thread)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within it, the stream gives no batch."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def give_back(self, items: Iterable[ReadItem]) -> None:
        """Give ``items``, the last ones taken, in order, before all others."""
        self._given_back.extendleft(reversed(list(items)))

    def restored(self) -> Iterator[Tree]:
        """The batches of the stream in the user's form, on the device or not."""
        form = TorchrecBatchForm()
        for item in self:
            yield form.restore(item[0])[0]

    def drop(self) -> None:
        """Forget the iterator and all batches that were read; waits for the one being read."""
        self._given_back.clear()
        self._thread.drop()

    def close(self) -> None:
        """End the thread. A new one is started where more batches are asked for."""
        self._thread.close()
