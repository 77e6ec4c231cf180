"""The erasing of ids within a step of admission."""

from typing import NamedTuple

from torch import Tensor

from torchembed.ops.hash_table import Counter, HashTables
from torchembed.tables.dynamic.deletion_log import DeletionLog


class ErasingStep(NamedTuple):
    """A step of admission in which ids go that are too old, or of too little score."""

    hash_tables: HashTables
    """Changed."""
    epoch: Tensor
    """int64 ``[1]``: the newest admission epoch."""
    released: Tensor
    """int64 ``[1]``: rows that were used in a later epoch stay."""
    is_trained: Tensor | None
    """bool ``[1]``: False where nothing may change; None: True."""
    deletions: DeletionLog | None
    """Notes the ids that go."""

    def erase(self, slots: Tensor, is_erased: Tensor, tables: Tensor, reason: Counter) -> None:
        """Erase the ids of some slots, and note them. The caller has counted them. Torch operations
        of static shapes: never waits for a GPU, and may be captured.

        Args:
            slots: int64 ``[n]``, distinct.
            is_erased: bool ``[n]``; False where ``is_trained`` is.
            tables: ``[n]``, integers: the table of each slot.
            reason: the counter that has counted them.
        """
        if self.deletions is not None:
            ids = self.hash_tables.keys[slots]
            self.deletions.append(is_erased, ids, tables, self.epoch, reason)
        for state in self.hash_tables.of_slots():
            state.scatter_(0, slots, state[slots].masked_fill(is_erased, 0))
