"""Batches that are read before the step that trains them."""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

from torchembed.core import ranks
from torchembed.step.jagged_step import JaggedBatch
from torchembed.step.step_kinds import StepKinds

_STALL_SECONDS = 1e-4
"""A batch that is ready comes faster."""


class InputStalls(NamedTuple):
    """Waits for batches that were not ready."""

    count: int
    seconds: float


@dataclasses.dataclass
class Upcoming:
    """A batch that was read and not trained yet."""

    batch: Any
    number: int
    agreed: Callable[[], tuple[int, ...]]
    """The :class:`StepKinds` of all ranks' batches, and the most ids of one, negated."""
    jagged: JaggedBatch | None = None
    """Where its ids are being announced."""
    placed: "Future[bool] | None" = None
    """Where it is brought to its slot of padded steps: whether it was, once the host has done its
    part."""
    needs: "Future[list[int] | None] | None" = None
    """Where it is being found out what padded steps need for it."""

    @property
    def turn(self) -> int:
        """Of two, that static steps take."""
        return self.number % 2

    @property
    def kinds(self) -> StepKinds:
        """As which kind every rank's batch can be trained; waits for the other ranks to read."""
        static, jagged, _ = self.agreed()
        return StepKinds(static=bool(static), jagged=bool(jagged))

    @property
    def num_ids(self) -> int:
        """The most that a rank's sparse features hold; waits likewise."""
        return -self.agreed()[2]

    def is_jagged(self) -> bool:
        return self.kinds.jagged


class ReadAhead:
    """Batches of one source that were not trained yet, in their order."""

    def __init__(self) -> None:
        self.stalls = InputStalls(0, 0.0)
        self._batches: collections.deque[Upcoming] = collections.deque()
        self._source: Iterator[Any] | None = None
        self._error: Exception | None = None
        """What reading the batch after them raised."""

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Upcoming]:
        return iter(self._batches)

    @property
    def first(self) -> Upcoming | None:
        return self._batches[0] if self._batches else None

    def follow(self, source: Iterator[Any]) -> None:
        """Read from ``source`` from now on; what another one gave is left out."""
        if source is not self._source:
            self._forget()
            self._source = source

    def fill(self, count: int, take_in: Callable[[Any], Upcoming]) -> None:
        """Read until there are ``count`` batches, or no more; :meth:`check` raises errors."""
        while len(self._batches) < count and self._error is None:
            try:
                item = self._next()
                if item is None:
                    return
                self._batches.append(take_in(item))
            except Exception as error:  # noqa: BLE001 - raised once the step before has its result
                self._error = error

    def _next(self) -> Any:
        """The next of the source, None after the last one; a wait for it is counted."""
        assert self._source is not None
        start = time.perf_counter()
        item = next(self._source, None)
        seconds = time.perf_counter() - start
        if seconds > _STALL_SECONDS:
            self.stalls = InputStalls(self.stalls.count + 1, self.stalls.seconds + seconds)
        return item

    def check(self) -> None:
        """Raise what reading raised, where its turn has come: after the batches before it, but on
        one of several ranks at once, since the others may wait for this one to read."""
        if self._error is not None and (ranks.world_size() > 1 or not self._batches):
            error = self._error
            self._forget()
            raise error

    def pop(self) -> Upcoming | None:
        """The next batch; None after the last one. Raises as :meth:`check` does."""
        self.check()
        if self._batches:
            return self._batches.popleft()
        self._forget()
        return None

    def _forget(self) -> None:
        self._batches.clear()
        self._source = self._error = None
