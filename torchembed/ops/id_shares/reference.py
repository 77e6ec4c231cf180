"""The specification of the operations on shares of ids in eager torch.

The share of an id is ``floor(h * num_shares / 2**32)`` for the high 32 bits h of the id's hash, so
that ids in a row, or all of one remainder, spread evenly.
"""

import torch
from torch import Tensor

from torchembed.core.random_bits import SHARE_KEY, random_bits, shift_right


def shares_of_ids_reference(ids: Tensor, num_shares: int) -> Tensor:
    return (_high_bits(ids) * num_shares) >> 32


def are_in_share_reference(
    ids: Tensor, hotness: list[int], num_shares: Tensor, shares: Tensor, batch_size: int
) -> Tensor:
    counts = torch.tensor(hotness, device=ids.device, dtype=torch.int64) * batch_size
    features = torch.arange(len(hotness), device=ids.device)
    of_ids = torch.repeat_interleave(features, counts, output_size=ids.numel())
    return (_high_bits(ids) * num_shares[of_ids]) >> 32 == shares[of_ids]


def _high_bits(ids: Tensor) -> Tensor:
    """The high 32 bits of the hashes of ``ids``, int64."""
    ids = ids.long()
    return shift_right(random_bits(torch.full_like(ids, SHARE_KEY), ids), 32)
