"""Windows over the slots of hash tables, so that a pass over all of them is spread over steps."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.ops.hash_table import TableShape, slot_ranges


class Window(NamedTuple):
    """Slots of all tables that one step visits."""

    slots: Tensor
    """int64 ``[n]``, distinct."""
    is_due: Tensor
    """bool ``[n]``: False for entries that fill the window up."""


class SlotWindows:
    """Divides the slots of a group's tables among ``num_steps`` steps, by whole blocks.

    A key lies within one block, so that the rows that compete for a place are visited at one step.
    Which step visits a slot is a function of its number, and every window is as large.

    Args:
        shapes: of the tables, in order.
        num_steps: within which each slot is visited once, at least 1.
        device: of the tables.
        begins_anew: True if the next pass over a table begins once all of its blocks were visited,
            so that one with few blocks is visited in every step; False if passes take
            ``num_steps``.

    Attributes:
        num_steps: as given.
        tables: int64 ``[n]``: the table of each entry of a window.
    """

    def __init__(
        self,
        shapes: Sequence[TableShape],
        num_steps: int,
        device: torch.device,
        *,
        begins_anew: bool,
    ) -> None:
        self.num_steps = num_steps
        entries = []
        for slots, shape in zip(slot_ranges(shapes), shapes, strict=True):
            num_blocks = -(-shape.num_blocks // num_steps)
            length = num_blocks * shape.num_buckets * shape.num_slots
            pass_steps = -(-shape.num_blocks // num_blocks) if begins_anew else num_steps
            fixed = torch.tensor([*slots, length, pass_steps])
            offsets = torch.arange(length)
            entries.append(torch.cat([fixed[:, None].expand(-1, length), offsets[None]]))
        columns = torch.cat(entries, dim=1).to(device)
        self.tables, self._firsts, self._sizes, self._lengths = columns[:4]
        self._pass_steps, self._offsets = columns[4:]

    def at(self, epoch: Tensor) -> Window:
        """The window of ``epoch``, int64 ``[1]``. Never waits for a GPU."""
        places = epoch % self._pass_steps * self._lengths + self._offsets
        return Window(self._firsts + places % self._sizes, places < self._sizes)
