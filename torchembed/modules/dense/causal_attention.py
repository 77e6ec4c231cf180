"""Causal attention within the bags of a jagged batch."""

import torch.nn.functional as F
from torch import Tensor

from torchembed.ops.padded_layout import PaddedLayout


def causal_attention(
    query: Tensor, key_value: Tensor, layout: PaddedLayout, *, dropout: float = 0.0
) -> Tensor:
    """Each row attends, by scaled dot products, to itself and the rows before it in its bag.

    A. Vaswani et al., "Attention Is All You Need", NeurIPS 2017, by
    ``scaled_dot_product_attention``, which is flash attention on a GPU in 16 bits: no scores are in
    memory, nor any mask. Rows are padded to a dense tensor for the attention alone, at the end of
    each bag, where no row before them attends to them.

    Args:
        query: ``[L, H, D]``, heads ``H`` of ``D`` columns.
        key_value: ``[L, 2, H, D]``: keys and values, in one tensor, which is padded once.
        layout: the rows' places; what has no place gets zeros.
        dropout: probability with which a weight of attention is dropped.

    Returns:
        ``[L, H, D]``.
    """
    key, value = layout.pad(key_value).transpose(1, 3).unbind(2)
    attended = F.scaled_dot_product_attention(
        layout.pad(query).transpose(1, 2), key, value, dropout_p=dropout, is_causal=True
    )
    return layout.pack(attended.transpose(1, 2))
