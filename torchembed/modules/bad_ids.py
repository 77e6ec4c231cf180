"""Errors for ids outside their table, raised at once on the CPU and at a later call on a GPU, and
for offsets outside the ids."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.stand_ins import is_stand_in


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


class _Collected(threading.local):
    """Lists that collect this thread's checks, the innermost last."""

    def __init__(self) -> None:
        self.lists: list[list[IdCheck]] = []


_collected = _Collected()


@contextlib.contextmanager
def deferred_id_checks() -> Iterator[list[IdCheck]]:
    """Collect the checks of this thread's lookups, one each, in place of raising for a bad id.

    The caller acts on the list that the context yields.
    """
    checks: list[IdCheck] = []
    _collected.lists.append(checks)
    try:
        yield checks
    finally:
        _collected.lists.pop()


class _Copied(NamedTuple):
    """A check whose numbers are being copied to the host."""

    copied: torch.cuda.Event
    """Recorded after the copy."""
    found: Tensor
    """Pinned copy of :attr:`IdCheck.found`."""
    num_ids: int
    describe: Callable[..., str]


class BadIdReport:
    """Turns the ``first_bad`` of a batch's ids into an ``IndexError``.

    On a GPU the position is copied to pinned memory without waiting and read at a later call, once
    the copy is done. Nothing is recorded while a CUDA graph is captured: the owner of the graph
    checks ids by :func:`deferred_id_checks`.
    """

    def __init__(self) -> None:
        self._in_flight: list[_Copied] = []

    def __reduce__(self) -> tuple[type["BadIdReport"], tuple[()]]:
        """Copies and pickles start without batches in flight."""
        return BadIdReport, ()

    def submit(
        self,
        values: Tensor,
        first_bad: Tensor,
        bounds: Tensor | None,
        describe: Callable[..., str],
    ) -> None:
        """Check the batch's ``first_bad [1]``; ``describe(position, value)`` makes the error's
        message, for jagged bags ``describe(position, value, feature, first)``.

        Args:
            bounds: ``[F + 1]``, where each feature's ids begin and end; None for fixed hotness.

        Raises:
            IndexError: for this batch on the CPU, for an earlier one on a GPU.
        """
        # Tracing has no ids yet.
        if is_stand_in(first_bad):
            return
        if _collected.lists:
            _collected.lists[-1].append(
                IdCheck(_found(values, first_bad, bounds), values.numel(), describe)
            )
            return
        if not values.is_cuda:
            position = int(first_bad)
            if position < values.numel():
                raise IndexError(describe(*_found(values, first_bad, bounds).tolist()))
            return
        # Batches that were copied before are reported now: reading this one would block the host.
        self.check(wait=False)
        if torch.cuda.is_current_stream_capturing() or values.numel() == 0:
            return
        found = _found(values, first_bad, bounds)
        pinned = torch.empty(found.shape, dtype=torch.int64, pin_memory=True)
        pinned.copy_(found, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._in_flight.append(_Copied(event, pinned, values.numel(), describe))

    def check(self, *, wait: bool) -> None:
        """Raise for an earlier batch's bad id; ``wait`` for all batches submitted so far."""
        while self._in_flight:
            event, found, num_ids, describe = self._in_flight[0]
            # In order: a later batch's copy ends after this one's.
            if not event.query():
                if not wait:
                    return
                event.synchronize()
            self._in_flight.pop(0)
            numbers = found.tolist()
            if numbers[0] < num_ids:
                self._in_flight.clear()
                raise IndexError(describe(*numbers))


def _found(values: Tensor, first_bad: Tensor, bounds: Tensor | None) -> Tensor:
    """The numbers of :attr:`IdCheck.found` for the first bad id."""
    if values.numel() == 0:
        return first_bad.new_zeros(2 if bounds is None else 4)
    value = values[first_bad.clamp_max(values.numel() - 1)].long()
    if bounds is None:
        return torch.cat([first_bad, value])
    # Counted on the device, since a search on the host would wait for it.
    feature = (bounds[1:] <= first_bad).sum(0, keepdim=True)
    return torch.cat([first_bad, value, feature, bounds[feature].long()])


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
