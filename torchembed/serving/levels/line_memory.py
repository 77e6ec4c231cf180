"""Memory of the lines of a cache: on the device, or of the host with copies on the device."""

import torch
from torch import Tensor

from torchembed.ops.cached_lookup import LineCopies
from torchembed.ops.row_cache import (
    RowMoves,
    claim_slots,
    empty_row_cache,
    find_cached,
    move_rows,
    read_rows,
)
from torchembed.tables.tiers.host_memory import host_tensor

_HALF_LIFE = 20
"""Uses count half after this many others for each copy: so many that frequent lines are told from
others, and so few that lines which become frequent have a copy soon."""
_MOST_USES = torch.finfo(torch.float16).max


class DeviceLines:
    """Lines on a device.

    Args:
        num_lines: those that are read; one more behind them takes what is written to none.
        line_bytes: of each.
    """

    def __init__(self, num_lines: int, line_bytes: int, device: torch.device) -> None:
        self.lines = torch.zeros(num_lines + 1, line_bytes, dtype=torch.uint8, device=device)
        """uint8 ``[num_lines + 1, line_bytes]``."""
        self.line_copies: LineCopies | None = None
        """No line has a copy elsewhere."""
        self._trash = num_lines

    def read(self, slots: Tensor) -> Tensor:
        """The lines of ``slots``, int64 ``[L]``: uint8 ``[L, line_bytes]``; any line for -1."""
        return self.lines[slots]

    def write(self, slots: Tensor, lines: Tensor) -> None:
        """Write ``lines [n, line_bytes]`` to ``slots [n]``: -1 for those that are left out."""
        self.lines[torch.where(slots < 0, self._trash, slots)] = lines


class HostLines:
    """Lines in memory of the host, which a GPU reads by itself, and copies of some on the device.

    Nothing ever differs between a line and its copy. No method but :meth:`keep` waits for a GPU.

    Args:
        num_lines: in memory of the host.
        line_bytes: of each, an even number.
        num_copies: that there is room for on the device.
    """

    def __init__(
        self, num_lines: int, line_bytes: int, num_copies: int, device: torch.device
    ) -> None:
        self.lines = host_tensor((num_lines, line_bytes), torch.uint8, device)
        """uint8 ``[num_lines, line_bytes]``; pages of it are locked for a GPU."""
        # One more copy takes what is written to lines that have none.
        self.copies = torch.zeros(num_copies + 1, line_bytes, dtype=torch.uint8, device=device)
        """uint8 ``[num_copies + 1, line_bytes]``."""
        self._num_copies = num_copies
        self._cache = empty_row_cache(num_lines, num_copies, device)
        # Rows are moved as numbers, whose bits they keep.
        self._dtype = torch.float16 if line_bytes % 4 else torch.float32
        self._epoch = torch.zeros(1, dtype=torch.int64, device=device)
        self._uses = torch.zeros(num_lines, dtype=torch.float16, device=device)
        self._num_noted = 0
        self.line_copies: LineCopies | None = LineCopies(self.copies, self._cache.slot_of_row)
        """Which lines have a copy on the device."""

    def read(self, slots: Tensor) -> Tensor:
        """Read lines, as :meth:`DeviceLines.read` does."""
        copies = find_cached(self._cache.slot_of_row, slots)
        numbers = read_rows(
            self.copies.view(self._dtype), self.lines.view(self._dtype), copies, slots
        )
        return numbers.view(torch.uint8)

    def write(self, slots: Tensor, lines: Tensor) -> None:
        """Write lines, as :meth:`DeviceLines.write` does."""
        num_lines = len(slots)
        if not num_lines:
            return
        moves = RowMoves(
            slots=torch.arange(num_lines, dtype=torch.int32, device=slots.device),
            written_rows=slots,
            read_rows=torch.full_like(slots, -1),
            count=torch.full_like(slots[:1], num_lines),
        )
        # By the device, so that lookups enqueued before read what was there.
        move_rows(moves, [lines.contiguous().view(self._dtype)], [self.lines.view(self._dtype)])
        copies = find_cached(self._cache.slot_of_row, slots, no_slot=self._num_copies)
        self.copies[copies] = lines

    def keep(self, slots: Tensor) -> None:
        """Note the uses of a lookup that found ``slots``, int64 ``[L]``, -1 for none, and have
        copies of the lines that were used most, of its own and those that have one. Uses count half
        after some others; a line takes the place of one that was used less, not as often. Waits for
        the device."""
        of_ids = slots[slots >= 0]
        used, uses = of_ids.unique(return_counts=True)
        self._num_noted += len(of_ids)
        if self._num_noted > _HALF_LIFE * self._num_copies:
            self._uses *= 0.5
            self._num_noted = 0
        self._uses[used] = (self._uses[used] + uses).clamp_max(_MOST_USES)

        without = used[self._cache.slot_of_row[used] < 0]
        if not len(without):
            return
        of_others = self._uses[without]
        rows = self._cache.row_of_slot
        of_copies = self._uses[rows].where(rows >= 0, -1)
        # Stable, so that of lines that were used as often those that have a copy come first.
        order = torch.cat([of_copies, of_others]).argsort(descending=True, stable=True)
        is_most_used = torch.zeros_like(order, dtype=torch.bool)
        is_most_used[order[: self._num_copies]] = True
        wanted = without[is_most_used[self._num_copies :]]
        # Their copies take the places of the others.
        self._cache.is_recent.copy_(is_most_used[: self._num_copies])
        self._epoch += 1
        claimed = claim_slots(
            self._cache,
            wanted,
            torch.full((1,), len(wanted), dtype=torch.int32, device=wanted.device),
            epoch=self._epoch,
            released=self._epoch - 1,
        )
        copies = self.copies[:-1].view(self._dtype)
        move_rows(claimed.moves, [copies], [self.lines.view(self._dtype)])
        # A copy is what its line is, so that none is ever written back.
        self._cache.is_dirty.zero_()
