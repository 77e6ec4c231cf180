"""Expiry: rows of dynamic tables go once no training batch has used them for long enough."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from torchembed.ops.hash_table import Counter, TableShape, count_erased
from torchembed.tables.deferred_interrupts import interrupts_deferred
from torchembed.tables.dynamic.epoch_times import EpochTimes
from torchembed.tables.dynamic.erasing_step import ErasingStep
from torchembed.tables.dynamic.policies import Dynamic
from torchembed.tables.dynamic.slot_windows import SlotWindows


class Expiry:
    """Erases the ids that training has not used for a time to live: each step looks at a window of
    slots, of each table a block at least.

    Args:
        ttl_steps: how many steps ids live without use; None for any number.
        times: turns a time to live in seconds into an epoch; None without one.
        windows: over the slots of the tables.
    """

    def __init__(
        self, ttl_steps: int | None, times: EpochTimes | None, windows: SlotWindows
    ) -> None:
        assert ttl_steps is not None or times is not None
        self._ttl_steps, self._times, self._windows = ttl_steps, times, windows

    @classmethod
    def under(
        cls, dynamic: Dynamic, shapes: Sequence[TableShape], device: torch.device
    ) -> Self | None:
        """The expiry of tables of ``shapes`` by their policies; None where ids live for ever."""
        times = None
        if dynamic.ttl_seconds is not None:
            times = EpochTimes(dynamic.ttl_seconds, dynamic.clock, device)
        if dynamic.ttl_steps is None and times is None:
            return None
        windows = SlotWindows(shapes, dynamic.sweep_steps, device, begins_anew=True)
        return cls(dynamic.ttl_steps, times, windows)

    def over(self, shapes: Sequence[TableShape], device: torch.device) -> Self:
        """The same expiry, which goes on, of tables of other shapes."""
        windows = SlotWindows(shapes, self._windows.num_steps, device, begins_anew=True)
        return type(self)(self._ttl_steps, self._times, windows)

    @property
    def by_time(self) -> bool:
        """True if ids live for some seconds, so that :meth:`note_time` must be called."""
        return self._times is not None

    def note_time(self, last: Tensor) -> None:
        """Ask the clock, where ids live for some seconds: ``last``, int64 ``[1]``, is the newest
        epoch now. Between steps. Never waits for a GPU."""
        if self._times is not None:
            self._times.note(last)

    def forget_times(self) -> None:
        """Let all ids live anew, where they live for some seconds: ids came whose times of use are
        not known."""
        if self._times is not None:
            self._times.forget()

    @interrupts_deferred()  # An id goes from all tensors, or stays.
    def erase(self, step: ErasingStep) -> None:
        """Erase, in the window of the step's epoch, the ids that are too old in it.

        Torch operations of static shapes: never waits for a GPU, and may be captured.
        """
        hash_tables, epoch = step.hash_tables, step.epoch
        limits = [] if self._times is None else [self._times.newest]
        if self._ttl_steps is not None:
            limits.append(epoch - self._ttl_steps)
        # The last epoch whose rows expire: none of them is in use.
        newest = torch.minimum(torch.cat(limits).amax(0, keepdim=True), step.released)
        tables, (slots, is_due) = self._windows.tables, self._windows.at(epoch)
        touched = hash_tables.touched[slots]
        is_expired = is_due & (hash_tables.digests[slots] > 0) & (touched <= newest)
        if step.is_trained is not None:
            is_expired &= step.is_trained
        num_gone, reason = is_expired.long(), Counter.EVICTED_EXPIRED
        count_erased(hash_tables.counters, tables, num_gone, num_gone * (epoch - touched), reason)
        step.erase(slots, is_expired, tables, reason)
