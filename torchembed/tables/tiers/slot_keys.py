"""Keys of the rounding of rows that are in the slots of a cache."""

import torch
from torch import Tensor

from torchembed.core.random_bits import GOLDEN, signed64
from torchembed.ops.rowwise_update import RoundingKeys


class SlotKeys:
    """A key for each slot, under which its row draws what it draws where all rows are stored.

    Args:
        num_slots: rows of the weight of the cache.
        device: of the cache.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._keys = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._columns = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._offsets = torch.arange(num_slots + 1, device=device)

    def note(self, slots: Tensor, rows: Tensor, of_rows: RoundingKeys) -> None:
        """Bring the keys of slots in line with the rows that they hold. Never waits for a GPU.

        Args:
            slots: ``[n]``; -1 for none.
            rows: ``[n]``, of the group.
            of_rows: the keys of all rows.
        """
        # Entries without a slot write to the last element, which is no slot's.
        slots = torch.where(slots < 0, self._offsets.numel() - 1, slots).long()
        rows = rows.clamp_min(0).long()
        number = torch.searchsorted(of_rows.row_offsets, rows, right=True) - 1
        keys = of_rows.row_keys[number] + (rows - slots) * signed64(GOLDEN)
        self._keys.scatter_(0, slots, keys)
        if of_rows.first_columns is not None:
            self._columns.scatter_(0, slots, of_rows.first_columns[number])

    def for_updates(self, of_rows: RoundingKeys) -> RoundingKeys:
        """The keys as row updates take them; later moves change them in place."""
        columns = None if of_rows.first_columns is None else self._columns[:-1]
        return RoundingKeys(self._offsets, self._keys[:-1], columns)
