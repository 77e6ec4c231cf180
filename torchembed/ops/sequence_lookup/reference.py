"""The specification of ``sequence_lookup_forward`` in eager torch."""

import torch
from torch import Tensor


def sequence_lookup_forward_reference(
    weight: Tensor, rows: Tensor, output_dtype: torch.dtype
) -> Tensor:
    if weight.shape[0] == 0:
        return weight.new_zeros(rows.numel(), weight.shape[1], dtype=output_dtype)
    vectors = weight[rows.long().clamp_min(0)].to(output_dtype)
    return torch.where((rows >= 0).unsqueeze(1), vectors, 0.0)
