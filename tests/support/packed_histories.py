"""Histories of any lengths, packed into tensors of one shape."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchembed.models import Histories


def packed_histories(
    lengths: Sequence[int], *, num_items: int, spare: int = 0, seed: int = 0, times: bool = False
) -> Histories:
    """Histories of ``lengths`` with random items, and ``spare`` places behind the last."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    num_places = sum(lengths) + spare

    def drawn(largest: int) -> Tensor:
        return torch.randint(largest, (num_places,), generator=generator)

    items, next_items = drawn(num_items), drawn(num_items)
    if not times:
        return Histories(items, offsets, next_items)
    seen = drawn(100_000).cumsum(0)
    return Histories(items, offsets, next_items, seen, F.pad(seen[1:], (0, 1), value=0))
