"""Updates of rows that come one behind the other, joined to one."""

import dataclasses

import torch

from torchembed.streams import RowUpdate

_MAX_BATCH_BYTES = 1 << 24
"""Of rows: for so long lookups may wait while they are written."""


class RowBatch:
    """Updates of one table that are written at once, to the same end as one behind the other.

    They are of one version and width, and each is behind those before it in its partition, so that
    all of them may be applied where the first may. Keys are deleted after rows are written, so that
    no rows follow deletions.
    """

    def __init__(self, first: RowUpdate) -> None:
        self.updates = [first]
        self._last = {first.origin.partition: first}
        self._num_bytes = first.rows.nbytes
        self._has_deletions = len(first.deleted_keys) > 0

    def takes(self, update: RowUpdate) -> bool:
        """True where ``update``, of the same table, may be added."""
        first, last = self.updates[0], self._last.get(update.origin.partition)
        if update.version != first.version or update.rows.dtype != first.rows.dtype:
            return False
        if update.rows.shape[1] != first.rows.shape[1]:
            return False
        if last is not None and (
            update.origin.publisher != last.origin.publisher or update.sequence <= last.sequence
        ):
            return False
        if self._has_deletions and len(update.keys):
            return False
        return self._num_bytes + update.rows.nbytes <= _MAX_BATCH_BYTES

    def add(self, update: RowUpdate) -> None:
        """Add an update that :meth:`takes` had nothing against."""
        self.updates.append(update)
        self._last[update.origin.partition] = update
        self._num_bytes += update.rows.nbytes
        self._has_deletions |= len(update.deleted_keys) > 0

    def last_updates(self) -> list[RowUpdate]:
        """The last update of each partition."""
        return list(self._last.values())

    def joined(self) -> RowUpdate:
        """All updates as one; of a key that comes several times the last row counts."""
        if len(self.updates) == 1:
            return self.updates[0]
        return dataclasses.replace(
            self.updates[-1],
            keys=torch.cat([update.keys for update in self.updates]),
            rows=torch.cat([update.rows for update in self.updates]),
            deleted_keys=torch.cat([update.deleted_keys for update in self.updates]),
        )
