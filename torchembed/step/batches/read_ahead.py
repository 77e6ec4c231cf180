"""Batches that are read before the step that trains them."""

import collections
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from torchembed.core import ranks
from torchembed.core.trees import Tree
from torchembed.data.batch import not_none
from torchembed.step.stages import ReadBatch

_STALL_SECONDS = 1e-4
"""A read that takes longer counts as a stall."""

_END = object()
"""Stands for the item after the last one."""


class InputStalls(NamedTuple):
    """Number and duration of waits for batches that were not ready."""

    count: int
    seconds: float


class ReadAhead:
    """Batches that were read from one source and not trained yet, in order."""

    def __init__(self) -> None:
        self.stalls = InputStalls(0, 0.0)
        self._batches: collections.deque[ReadBatch] = collections.deque()
        self._given: Iterable[Tree] | None = None
        self._source: Iterator[Tree] | None = None
        self._error: Exception | None = None
        """Raised by reading the batch after them."""

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[ReadBatch]:
        return iter(self._batches)

    def replace(self, change: Callable[[ReadBatch], ReadBatch]) -> None:
        """Put ``change(batch)`` in the place of each batch, in order."""
        self._batches = collections.deque(map(change, self._batches))

    def follow(self, source: Iterable[Tree]) -> None:
        """Read from ``source`` from now on; untrained batches of another source are dropped.

        Raises:
            TypeError: if it cannot be iterated.
        """
        if source is not self._given:
            # A mapping and a tensor can be iterated as well, but are one batch.
            if not isinstance(source, Iterable) or isinstance(source, (Mapping, Tensor, str)):
                raise TypeError(
                    "batches must be an iterator or an iterable of batches, as iter(data_loader) "
                    f"or iter([batch]) for one batch, got {type(source).__name__}"
                )
            self._forget()
            self._given, self._source = source, iter(source)

    def fill(self, count: int, take_in: Callable[[Tree], ReadBatch]) -> None:
        """Read until there are ``count`` batches, or no more; :meth:`check` raises errors."""
        while len(self._batches) < count and self._error is None:
            try:
                item = self._next()
                if item is _END:
                    return
                self._batches.append(take_in(not_none(item)))
            except Exception as error:  # noqa: BLE001 - raised once the step before has its result
                self._error = error

    def _next(self) -> Tree:
        """Read the next item, ``_END`` after the last one; a slow read is counted as a stall."""
        assert self._source is not None
        start = time.perf_counter()
        item = next(self._source, _END)
        seconds = time.perf_counter() - start
        if seconds > _STALL_SECONDS:
            self.stalls = InputStalls(self.stalls.count + 1, self.stalls.seconds + seconds)
        return item

    def check(self) -> None:
        """Raise an error of reading: after the batches before it are trained; but at once where
        there are several ranks, since the others may wait for this one's batch."""
        if self._error is not None and (ranks.world_size() > 1 or not self._batches):
            error, self._error = self._error, None
            self._batches.clear()
            raise error

    def pop(self) -> ReadBatch | None:
        """The next batch; None after the last one. Raises as :meth:`check` does."""
        self.check()
        if self._batches:
            return self._batches.popleft()
        self._forget()
        return None

    def _forget(self) -> None:
        self._batches.clear()
        self._given = self._source = self._error = None
