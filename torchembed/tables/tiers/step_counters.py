"""Counters of what train steps bring into a cache themselves, and not ahead of them."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.ops.row_cache import CacheCounter


class StepCounters(NamedTuple):
    """Counts of a cache on its device, beside ``RowCache.counters``; only of batches that are
    trained."""

    of_forwards: Tensor
    """int64, one for each :class:`CacheCounter`: of batches that a forward looked up itself."""
    late: Tensor
    """Likewise: of batches that were prepared ahead, and whose rows the step fetched all the same;
    these count ahead too."""
    late_batches: Tensor
    """int64 ``[1]``: how many batches ``late`` is of."""
    requested: Tensor
    """int64 ``[1]``: ids of all batches that have a row, duplicates counted."""


def new_step_counters(device: torch.device) -> StepCounters:
    """Counters of zero."""
    sizes = (len(CacheCounter), len(CacheCounter), 1, 1)
    return StepCounters(*(torch.zeros(n, dtype=torch.int64, device=device) for n in sizes))
