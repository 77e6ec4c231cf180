"""Expiry: rows of dynamic tables go once no training batch has used them for long enough."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from torchembed.ops.hash_table import Counter, HashTables, TableShape, count_erased
from torchembed.tables.dynamic.deletion_log import DeletionLog
from torchembed.tables.dynamic.epoch_times import EpochTimes
from torchembed.tables.dynamic.policies import Dynamic
from torchembed.tables.dynamic.slot_windows import SlotWindows


class Expiry:
    """Erases the ids that training has not used for a time to live, a window of slots each step.

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
        return cls(dynamic.ttl_steps, times, SlotWindows(shapes, dynamic.sweep_steps, device))

    def over(self, shapes: Sequence[TableShape], device: torch.device, sweep_steps: int) -> Self:
        """The same expiry, which goes on, of tables of other shapes."""
        windows = SlotWindows(shapes, sweep_steps, device)
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

    def erase(
        self,
        hash_tables: HashTables,
        epoch: Tensor,
        released: Tensor,
        is_trained: Tensor | None,
        deletions: DeletionLog | None,
    ) -> None:
        """Erase, in the window of ``epoch``, the ids that are too old in it.

        Torch operations of static shapes: never waits for a GPU, and may be captured.

        Args:
            hash_tables: changed.
            epoch: int64 ``[1]``: the newest admission epoch.
            released: int64 ``[1]``: rows that were used in a later epoch stay.
            is_trained: bool ``[1]``: False where nothing may change; None: True.
            deletions: notes the ids that go.
        """
        limits = [] if self._times is None else [self._times.newest]
        if self._ttl_steps is not None:
            limits.append(epoch - self._ttl_steps)
        newest = torch.minimum(torch.cat(limits).amax(0, keepdim=True), released)
        _erase_expired(hash_tables, self._windows, epoch, newest, is_trained, deletions)


def _erase_expired(
    hash_tables: HashTables,
    windows: SlotWindows,
    epoch: Tensor,
    newest: Tensor,
    is_trained: Tensor | None,
    deletions: DeletionLog | None,
) -> None:
    """Erase, in the window of ``epoch``, the ids that no batch after ``newest`` has used.

    Args:
        newest: int64 ``[1]``: the last epoch whose rows expire; none of them is in use.
    """
    slots, is_due = windows.at(epoch)
    touched = hash_tables.touched[slots]
    is_expired = is_due & (hash_tables.digests[slots] > 0) & (touched <= newest)
    if is_trained is not None:
        is_expired &= is_trained
    if deletions is not None:
        ids = hash_tables.keys[slots]
        deletions.append(is_expired, ids, windows.tables, epoch, Counter.EVICTED_EXPIRED)
    num_gone = is_expired.long()
    ages = num_gone * (epoch - touched)
    count_erased(hash_tables.counters, windows.tables, num_gone, ages, Counter.EVICTED_EXPIRED)
    for state in hash_tables.of_slots():
        state.scatter_(0, slots, state[slots].masked_fill(is_expired, 0))
