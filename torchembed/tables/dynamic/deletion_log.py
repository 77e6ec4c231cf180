"""The log of ids that left dynamic tables, from which deltas take their deletions."""

import secrets
from typing import NamedTuple, Self

import torch
from torch import Tensor

from torchembed.ops.hash_table import Counter, InsertedKeys
from torchembed.tables.dynamic.policies import Dynamic


class SnapshotDueError(RuntimeError):
    """A delta cannot be made, since what is known does not reach back to its mark: take a full
    snapshot."""


class LoggedDeletions(NamedTuple):
    """Ids that left tables, in the order in which they did."""

    ids: Tensor
    """int64 ``[n]``; an id that left several times stands there as often."""
    tables: Tensor
    """int64 ``[n]``: the table's number within the group."""
    epochs: Tensor
    """int64 ``[n]``: the admission epoch in which the id left."""
    reasons: Tensor
    """int64 ``[n]``: the :class:`~torchembed.ops.hash_table.Counter` that counted it."""


class DeletionLog:
    """A ring on the device of the last ids that left the tables of a group.

    Args:
        capacity: ids that it remembers, at least 1.
        device: of the tables.

    Attributes:
        history: names what the tables went through; another one where ids were loaded, so that
            marks from before are recognized.
    """

    ENTRY_BYTES = 4 * 8
    """Memory of one id."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._capacity = capacity
        # What is no deletion is written to the last entry, which is none of the ring's.
        self._entries = torch.zeros(capacity + 1, 4, dtype=torch.int64, device=device)
        self.num_appended = torch.zeros(1, dtype=torch.int64, device=device)
        """int64 ``[1]``: ids that were appended so far."""
        self.history = ""
        self.begin_anew()

    @classmethod
    def under(cls, dynamic: Dynamic, num_tables: int, device: torch.device) -> Self | None:
        """The log of a group by the policies of its tables; None where no delta is wanted."""
        num_ids = dynamic.deletion_log * num_tables
        return cls(num_ids, device) if num_ids else None

    def begin_anew(self) -> None:
        """Make marks from before invalid; for tables whose ids were loaded."""
        self.history = secrets.token_hex(16)

    def append(
        self, is_deleted: Tensor, ids: Tensor, tables: Tensor, epoch: Tensor, reason: Counter
    ) -> None:
        """Append those of ``ids [n]`` that are deleted. Never waits for a GPU, and may be captured.

        Args:
            is_deleted: bool ``[n]``.
            ids: int64 ``[n]``.
            tables: ``[n]``, integers: the table of each.
            epoch: int64 ``[1]``: of the batch that is admitted.
            reason: the counter that counts them.
        """
        flags = is_deleted.long()
        numbers = (self.num_appended + flags.cumsum(0) - 1) % self._capacity
        places = torch.where(is_deleted, numbers, self._capacity)
        of_reason = torch.full_like(ids, int(reason))
        entries = torch.stack([ids, tables.long(), epoch.expand_as(ids), of_reason], 1)
        self._entries.index_copy_(0, places, entries)
        self.num_appended.add_(flags.sum())

    def append_evicted(self, inserted: InsertedKeys, epoch: Tensor) -> None:
        """Append the ids that made room for others in a batch of ``epoch``, int64 ``[1]``."""
        is_evicted, ids, tables = inserted.is_evicted, inserted.evicted_keys, inserted.tables
        self.append(is_evicted, ids, tables, epoch, Counter.EVICTED_FULL)

    def since(self, num_before: int, num_now: int) -> LoggedDeletions:
        """The deletions after the first ``num_before`` up to the first ``num_now``, which are all.

        Raises:
            SnapshotDueError: if some of them were overwritten.
        """
        num_gone = num_now - num_before
        if num_gone > self._capacity:
            raise SnapshotDueError(
                f"since must be a mark after which at most {self._capacity} ids left the tables, "
                f"for which deletion_log has room, got one after which {num_gone} did; a full "
                "snapshot is due, delta(since=None); then take deltas more often, or a larger log"
            )
        numbers = torch.arange(num_before, num_now, device=self._entries.device)
        return LoggedDeletions(*self._entries[numbers % self._capacity].unbind(1))
