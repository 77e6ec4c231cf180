"""Decay of counts, so that ids that came often long ago make room for those that come now."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from torchembed.ops.hash_table import TableShape
from torchembed.tables.dynamic.policies import DecayingLFU, Dynamic
from torchembed.tables.dynamic.slot_windows import SlotWindows


class ScoreDecay:
    """Multiplies the scores of tables by a rate, a window of slots each step.

    Args:
        eviction: the rate, in ``[0, 1)``, and the steps within which each score decays once.
        shapes: of the tables, in order.
        device: of the tables.
    """

    def __init__(
        self, eviction: DecayingLFU, shapes: Sequence[TableShape], device: torch.device
    ) -> None:
        self._rate = eviction.rate
        steps = eviction.steps_per_decay
        self._windows = SlotWindows(shapes, steps, device, begins_anew=False)

    @classmethod
    def under(
        cls, dynamic: Dynamic, shapes: Sequence[TableShape], device: torch.device
    ) -> Self | None:
        """The decay of tables of ``shapes`` by their policies; None but under
        :class:`DecayingLFU`."""
        if not isinstance(dynamic.eviction, DecayingLFU):
            return None
        return cls(dynamic.eviction, shapes, device)

    def apply(self, scores: Tensor, epoch: Tensor, happens: Tensor) -> None:
        """Multiply the scores in the window of ``epoch`` by the rate, rounded down.

        Torch operations of static shapes: never waits for a GPU, and may be captured. A product of
        float64 is the same on every device.

        Args:
            scores: int64 ``[S]``, not negative; changed.
            epoch: int64 ``[1]``: the newest admission epoch.
            happens: bool ``[1]``: False where nothing may change.
        """
        slots, is_due = self._windows.at(epoch)
        counts = scores[slots]
        decayed = (counts.double() * self._rate).long()
        scores.scatter_(0, slots, torch.where(is_due & happens, decayed, counts))
