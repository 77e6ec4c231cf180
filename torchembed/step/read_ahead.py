"""Batches that are read before the step that trains them, and the kinds of step that can do it."""

import collections
import functools
import time
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

from torch import nn

from torchembed.core import ranks
from torchembed.core.trees import Tree, layout_of
from torchembed.modules.staged_collection import StagedCollection
from torchembed.step.batch_layout import (
    has_fixed_shape,
    jagged_layout,
    lengths_digest,
    num_ids_in,
)
from torchembed.step.layout_reasons import part_layouts, reason_of_layout
from torchembed.step.stages import Agreement, BatchKinds, ReadBatch, Reason

_STALL_SECONDS = 1e-4
"""A read that takes longer counts as a stall."""


class InputStalls(NamedTuple):
    """Number and duration of waits for batches that were not ready."""

    count: int
    seconds: float


class ReadAhead:
    """Batches that were read from one source and not trained yet, in order."""

    def __init__(self) -> None:
        self.stalls = InputStalls(0, 0.0)
        self._batches: collections.deque[ReadBatch] = collections.deque()
        self._source: Iterator[Tree] | None = None
        self._error: Exception | None = None
        """Raised by reading the batch after them."""

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[ReadBatch]:
        return iter(self._batches)

    def follow(self, source: Iterator[Tree]) -> None:
        """Read from ``source`` from now on; untrained batches of another source are dropped."""
        if source is not self._source:
            self._forget()
            self._source = source

    def fill(self, count: int, take_in: Callable[[Tree], ReadBatch]) -> None:
        """Read until there are ``count`` batches, or no more; :meth:`check` raises errors."""
        while len(self._batches) < count and self._error is None:
            try:
                item = self._next()
                if item is None:
                    return
                self._batches.append(take_in(item))
            except Exception as error:  # noqa: BLE001 - raised once the step before has its result
                self._error = error

    def _next(self) -> Tree:
        """Read the next item, None after the last one; a slow read is counted as a stall."""
        assert self._source is not None
        start = time.perf_counter()
        item = next(self._source, None)
        seconds = time.perf_counter() - start
        if seconds > _STALL_SECONDS:
            self.stalls = InputStalls(self.stalls.count + 1, self.stalls.seconds + seconds)
        return item

    def check(self) -> None:
        """Raise an error of reading: after the batches before it are trained; but at once where
        there are several ranks, since the others may wait for this one's batch."""
        if self._error is not None and (ranks.world_size() > 1 or not self._batches):
            error = self._error
            self._forget()
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
        self._source = self._error = None


class Layouts:
    """The layouts that the first batches of a kind have set for those after them."""

    def __init__(self, model: nn.Module) -> None:
        collections = [m for m in model.modules() if isinstance(m, StagedCollection)]
        self._all_wait = any(collection.always_waits_for_sizes for collection in collections)
        self._static: Hashable = None
        self._jagged: Hashable = None
        self._static_digest = self._jagged_digest = 0
        self._known: dict[Hashable, dict[str, Hashable]] = {}
        """The parts of the batches that have set a layout, by the layout."""

    def kinds_of(self, batch: Tree) -> BatchKinds:
        """The kinds of ``batch``, which sets the layout where it is the first of its kind."""
        if self._static is not None and layout_of(batch) == self._static:
            return BatchKinds(static=True, jagged=False)
        if has_fixed_shape(batch) and not self._all_wait:
            layout = layout_of(batch)
            if self._static is None:
                self._static, self._static_digest = layout, lengths_digest(batch)
                self._known[layout] = part_layouts(batch)
            return BatchKinds(static=layout is not None and layout == self._static, jagged=False)
        layout = jagged_layout(batch)
        if self._jagged is None:
            self._jagged, self._jagged_digest = layout, lengths_digest(batch)
            self._known[layout] = part_layouts(batch)
        return BatchKinds(static=False, jagged=layout is not None and layout == self._jagged)

    def why_eager(self, batch: Tree) -> Reason:
        """The reason why ``batch`` is of none of the kinds of captured steps."""
        is_static = has_fixed_shape(batch) and not self._all_wait
        return reason_of_layout(batch, self._known.get(self._static if is_static else self._jagged))

    def start_agreement(self, batch: Tree, kinds: BatchKinds) -> Callable[[], Agreement]:
        """Start to find out whether every rank's batch, of which ``batch`` is this rank's, is of
        ``kinds``; every rank must call it.

        Returns:
            A function that waits for the result and returns it, in any thread.
        """
        num_ids = num_ids_in(batch) if kinds.jagged else 0
        digest = self._static_digest if kinds.static else self._jagged_digest
        # One collective for all five numbers. The maximum of a number is the minimum of its
        # negative, and digests are all equal where minimum and maximum are.
        return functools.partial(_agreement, ranks.start_minimum(*kinds, -num_ids, digest, -digest))


def _agreement(least: Callable[[], tuple[int, ...]]) -> Agreement:
    """The agreement of all ranks, from the minimum over ranks of each of their numbers."""
    static, jagged, negated_num_ids, digest, negated_digest = least()
    # Captured steps exchange ids as if every rank's features had one hotness and kind of weights.
    is_alike = digest == -negated_digest
    kinds = BatchKinds(static=bool(static) and is_alike, jagged=bool(jagged) and is_alike)
    return Agreement(kinds, -negated_num_ids)
