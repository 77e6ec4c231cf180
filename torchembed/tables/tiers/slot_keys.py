"""Keys of the rounding of rows that are in the slots of a cache."""

import torch
from torch import Tensor

from torchembed.core.random_bits import GOLDEN, signed64
from torchembed.ops.row_cache import RowMoves
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

    def note(self, moves: RowMoves, of_rows: RoundingKeys) -> None:
        """Bring the keys of slots in line that took other rows; ``of_rows`` are those of all rows.
        Never waits for a GPU."""
        is_read = moves.read_rows >= 0
        # Moves that read nothing write to the last element, which is no slot's.
        slots = torch.where(is_read, moves.slots, self._offsets.numel() - 1).long()
        rows = moves.read_rows.clamp_min(0)
        number = torch.searchsorted(of_rows.row_offsets, rows, right=True) - 1
        keys = of_rows.row_keys[number] + (rows - slots) * signed64(GOLDEN)
        self._keys.scatter_(0, slots, keys)
        if of_rows.first_columns is not None:
            self._columns.scatter_(0, slots, of_rows.first_columns[number])

    def for_updates(self, of_rows: RoundingKeys) -> RoundingKeys:
        """The keys as row updates take them; later moves change them in place."""
        columns = None if of_rows.first_columns is None else self._columns[:-1]
        return RoundingKeys(self._offsets, self._keys[:-1], columns)


def all_moves(row_of_slot: Tensor) -> RowMoves:
    """Moves that would read the rows of all slots anew."""
    num_slots = row_of_slot.numel()
    slots = torch.arange(num_slots, dtype=torch.int32, device=row_of_slot.device)
    none = torch.full_like(row_of_slot, -1)
    return RowMoves(slots, none, row_of_slot, torch.full_like(row_of_slot[:1], num_slots))
