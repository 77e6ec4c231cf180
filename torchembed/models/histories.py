"""``Histories``: what users have seen, one after the other, as sequence models take it."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from torchembed.ops.padded_layout import PaddedLayout


class Histories(NamedTuple):
    """Histories of ``B`` users, one behind the other, without padding between them.

    Places behind the last history, ``offsets[-1]`` and further, count for nothing. So batches of
    any lengths may have tensors of one shape, and captured steps repeat for all of them.
    """

    PACKED_IDS = ("items",)
    """Fields between ``offsets``: programs of the model take them as a jagged feature."""

    items: Tensor
    """int64 ``[L]``: the items of each user, the oldest first."""
    offsets: Tensor
    """int64 ``[B + 1]``: where histories begin and end."""
    next_items: Tensor
    """int64 ``[L]``: the item that followed each."""
    times: Tensor | None = None
    """int64 ``[L]``: when each item was seen, in seconds; None where that is not known."""
    next_times: Tensor | None = None
    """int64 ``[L]``: when each of ``next_items`` was."""

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Histories":
        """The same with ``function`` of each tensor."""
        return Histories(
            function(self.items),
            function(self.offsets),
            function(self.next_items),
            None if self.times is None else function(self.times),
            None if self.next_times is None else function(self.next_times),
        )

    def layout(self, max_length: int) -> PaddedLayout:
        """The places of items in a dense tensor ``[B, max_length]``."""
        return PaddedLayout.of(self.offsets, max_length, self.items.shape[0])
