"""``bags_of_ids`` for exported programs: by a sum, since ONNX has no search."""

import torch
from torch import Tensor


def bags_of_ids(lengths: Tensor, num_ids: int) -> Tensor:
    """The bag of each id of jagged bags, int64 ``[L]``; ``B``, which is no bag, for ids behind the
    last one.

    For lengths ``[2, 0, 1]`` the bags end at 2, 2 and 3: of the positions 0 to 3, ``[0, 0, 2, 1]``
    bags end there, and the running sums of the first 3 are the bags of the ids, ``[0, 0, 2]``.
    """
    # Within range, since not every compiler checks where it scatters.
    ends = lengths.long().cumsum(0).clamp(0, num_ids)
    num_ends = ends.new_zeros(num_ids + 1).index_add(0, ends, torch.ones_like(ends))
    return num_ends.cumsum(0)[:num_ids]
