"""Decay of counts, so that ids that came often long ago make room for those that come now."""

import torch
from torch import Tensor

from torchembed.tables.slot_windows import SlotWindows


def decay_scores(
    scores: Tensor, windows: SlotWindows, epoch: Tensor, rate: float, happens: Tensor
) -> None:
    """Multiply the scores in the window of ``epoch`` by ``rate``, rounded down.

    Torch operations of static shapes: never waits for a GPU, and may be captured. A product of
    float64 is the same on every device.

    Args:
        scores: int64 ``[S]``, not negative; changed.
        windows: over the slots.
        epoch: int64 ``[1]``: the newest admission epoch.
        rate: in ``[0, 1)``.
        happens: bool ``[1]``: False where nothing may change.
    """
    slots, is_due = windows.at(epoch)
    counts = scores[slots]
    decayed = (counts.double() * rate).long()
    scores.scatter_(0, slots, torch.where(is_due & happens, decayed, counts))
