"""``Impressions``: candidates for users with histories, as models of target attention take them."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from torchembed.models.histories import Histories
from torchembed.ops.padded_layout import PaddedLayout


class Impressions(NamedTuple):
    """``C`` candidates for each of ``B`` users, with what each has seen.

    Histories lie one behind the other, as in :class:`~torchembed.models.Histories`; what is behind
    the last counts for nothing.
    """

    PACKED_IDS = ("items",)
    """Fields between ``offsets``: programs of the model take them as a jagged feature."""

    items: Tensor
    """int64 ``[L]``: the items that users have seen, the oldest first."""
    offsets: Tensor
    """int64 ``[B + 1]``: where histories begin and end."""
    candidates: Tensor
    """int64 ``[B, C]``."""
    labels: Tensor | None = None
    """float32 ``[B, C]``, 1 where a candidate was chosen; None where all were, or none is known."""

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Impressions":
        """The same with ``function`` of each tensor."""
        return Impressions(
            function(self.items),
            function(self.offsets),
            function(self.candidates),
            None if self.labels is None else function(self.labels),
        )

    def histories(self) -> Histories:
        """The users' histories alone; what followed each item is not known, and stands as the item
        itself."""
        return Histories(self.items, self.offsets, self.items)

    def layout(self, max_length: int) -> PaddedLayout:
        """The places of items in a dense tensor ``[B, max_length]``."""
        return PaddedLayout.of(self.offsets, max_length, self.items.shape[0])
