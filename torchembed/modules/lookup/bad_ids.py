"""Errors for ids outside their table, raised at once on the CPU and at a later call on a GPU, and
for offsets outside the ids."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.stand_ins import is_stand_in
from torchembed.ops.linearize_ids import locate_bad_id


class IdCheck(NamedTuple):
    """The first id of a batch that is outside its table, if any; still on the device."""

    found: Tensor
    """int64: the id's position, ``num_ids`` or more where there is none, and its value; for jagged
    bags also its feature and the position of that feature's first id, since the offsets may be
    those of another batch by the time of the error."""
    num_ids: int
    """Number of ids of the batch."""
    describe: Callable[..., str]
    """Makes the error's message from the numbers in ``found``."""
    error: type[Exception] = IndexError
    """The class of the error."""


IdChecks = Callable[[], contextlib.AbstractContextManager[list[IdCheck]]]
""":func:`deferred_id_checks`, or another function that makes such contexts."""


class _Collected(threading.local):
    """Lists that collect this thread's checks, the innermost last."""

    def __init__(self) -> None:
        self.lists: list[list[IdCheck] | None] = []
        """None in place of a list for checks that raise at once."""
        self.consequence = ""
        """The end of the message of errors that are raised at once."""


_collected = _Collected()


class _Deferred(contextlib.AbstractContextManager[list[IdCheck]]):
    # Not a generator, which takes three times as long, at each step.

    def __enter__(self) -> list[IdCheck]:
        checks: list[IdCheck] = []
        _collected.lists.append(checks)
        return checks

    def __exit__(self, *error: object) -> None:
        _collected.lists.pop()


def deferred_id_checks() -> contextlib.AbstractContextManager[list[IdCheck]]:
    """Collect the checks of this thread's lookups, one each, in place of raising for a bad id.

    The caller acts on the list that the context yields.
    """
    return _Deferred()


def collected_checks() -> list[IdCheck]:
    """The checks that the innermost :func:`deferred_id_checks` of this thread has collected so far;
    none where lookups raise."""
    return (_collected.lists[-1] or []) if _collected.lists else []


def any_bad(checks: Sequence[IdCheck]) -> Tensor:
    """True where one of the ``checks``, at least one, has found a bad id, bool ``[1]`` on the
    device."""
    bad = [check.found[:1] < check.num_ids for check in checks]
    # One check, the most frequent number, takes less than half the operations.
    return torch.cat(bad).any().reshape(1) if len(checks) > 1 else bad[0]


class ChecksAtOnce(contextlib.AbstractContextManager[list[IdCheck]]):
    """A context in which lookups on a CPU raise for a bad id as they do outside of any, and give an
    empty list; for one thread, and not within itself.

    Args:
        consequence: a sentence for the end of the message.
    """

    def __init__(self, consequence: str) -> None:
        self._consequence, self._before = f". {consequence}", ""

    def __enter__(self) -> list[IdCheck]:
        self._before = _collected.consequence
        _collected.lists.append(None)
        _collected.consequence = self._consequence
        return []

    def __exit__(self, *error: object) -> None:
        _collected.consequence = self._before
        _collected.lists.pop()


class _Reported(NamedTuple):
    """A check whose numbers are being written to the host's memory."""

    written: torch.cuda.Event
    """Recorded after they are."""
    found: Tensor
    """:attr:`IdCheck.found` in pinned memory."""
    num_ids: int
    describe: Callable[..., str]
    error: type[Exception]


class _Writing(NamedTuple):
    """Pinned memory that a GPU writes to."""

    written: torch.cuda.Event
    memory: Tensor


class _PinnedMemory:
    """Keeps pinned memory until a GPU has written to it, whatever becomes of who wanted it: what
    writes is a kernel, of which torch's cache of pinned memory does not know."""

    def __init__(self) -> None:
        self._writing: deque[_Writing] = deque()
        self._lock = threading.Lock()

    def keep(self, memory: Tensor, written: torch.cuda.Event) -> None:
        """Keep ``memory`` until ``written`` has passed."""
        with self._lock:
            while self._writing and self._writing[0].written.query():
                self._writing.popleft()
            self._writing.append(_Writing(written, memory))


_pinned_memory = _PinnedMemory()


class BadIdReport:
    """Turns the ``first_bad`` of a batch's ids into an ``IndexError``.

    A GPU writes it to pinned memory of the host, which does not wait and reads it at a later call.
    Nothing is recorded while a CUDA graph is captured: the owner of the graph checks ids by
    :func:`deferred_id_checks`.
    """

    def __init__(self) -> None:
        self._in_flight: list[_Reported] = []

    def __reduce__(self) -> tuple[type["BadIdReport"], tuple[()]]:
        """Copies and pickles start without batches in flight."""
        return BadIdReport, ()

    def submit(
        self,
        values: Tensor,
        first_bad: Tensor,
        bounds: Tensor | None,
        describe: Callable[..., str],
        error: type[Exception] = IndexError,
    ) -> None:
        """Check the batch's ``first_bad [1]``; ``describe(position, value)`` makes the error's
        message, for jagged bags ``describe(position, value, feature, first)``.

        Args:
            bounds: ``[F + 1]``, where each feature's ids begin and end; None for fixed hotness.
            error: the class of the error.

        Raises:
            IndexError, or ``error``: for this batch on the CPU, for an earlier one on a GPU.
        """
        # Tracing has no ids yet.
        if is_stand_in(first_bad):
            return
        collected = _collected.lists[-1] if _collected.lists else None
        if collected is not None:
            found = _found(values, first_bad, bounds)
            collected.append(IdCheck(found, values.numel(), describe, error))
            return
        if not values.is_cuda:
            position = int(first_bad)
            if position < values.numel():
                message = describe(*_found(values, first_bad, bounds).tolist())
                raise error(f"{message}{_collected.consequence}")
            return
        # Batches that are written already are reported now: to wait for this one would block the
        # host.
        self.check(wait=False)
        if torch.cuda.is_current_stream_capturing() or values.numel() == 0:
            return
        pinned = torch.empty(2 if bounds is None else 4, dtype=torch.int64, pin_memory=True)
        locate_bad_id(values, first_bad, bounds, pinned)
        event = torch.cuda.Event()
        event.record()
        _pinned_memory.keep(pinned, event)
        self._in_flight.append(_Reported(event, pinned, values.numel(), describe, error))

    def check(self, *, wait: bool) -> None:
        """Raise for an earlier batch's bad id; ``wait`` for all batches submitted so far."""
        while self._in_flight:
            event, found, num_ids, describe, error = self._in_flight[0]
            # In order: a later batch is written after this one.
            if not event.query():
                if not wait:
                    return
                event.synchronize()
            self._in_flight.pop(0)
            numbers = found.tolist()
            if numbers[0] < num_ids:
                self._in_flight.clear()
                raise error(describe(*numbers))


def _found(values: Tensor, first_bad: Tensor, bounds: Tensor | None) -> Tensor:
    """The numbers of :attr:`IdCheck.found` for the first bad id."""
    if values.numel() == 0:
        return first_bad.new_zeros(2 if bounds is None else 4)
    found = first_bad.new_empty(2 if bounds is None else 4)
    locate_bad_id(values, first_bad, bounds, found)
    return found


def is_readable(offsets: Tensor) -> bool:
    """True where the host may read ``offsets`` at once."""
    # A program of torch.compile or torch.export checks them when it runs.
    return not (offsets.is_cuda or offsets.is_meta or torch.compiler.is_compiling())


def check_offsets(offsets: Tensor, num_ids: int) -> None:
    """Check on the CPU that ``offsets`` mark bags among ``num_ids`` ids; a GPU is not waited for.

    Raises:
        ValueError: where they do not start at 0, decrease, or end after the ids.
    """
    if not is_readable(offsets):
        return
    decreases = offsets.diff() < 0
    if is_stand_in(decreases):
        return
    if decreases.any():
        bag = int(decreases.int().argmax())
        raise ValueError(
            f"offsets must not decrease, got {int(offsets[bag])} and {int(offsets[bag + 1])} at "
            f"positions {bag} and {bag + 1}"
        )
    if offsets[0] != 0 or offsets[-1] > num_ids:
        raise ValueError(
            f"offsets must start at 0 and end at the number of ids, {num_ids}, or before, "
            f"got {int(offsets[0])} and {int(offsets[-1])}"
        )
