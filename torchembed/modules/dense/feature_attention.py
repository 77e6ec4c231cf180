"""``FeatureAttention``: the interaction of features in AutoInt."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FeatureAttention(nn.Module):
    """One interacting layer of AutoInt: features attend to each other, with a residual part.

    ``relu(concat_h(softmax(q_h k_h^T / sqrt(d)) v_h) + x @ residual)`` with ``q, k, v`` linear in
    ``x``: equations 5 to 8 of W. Song et al., "AutoInt: Automatic Feature Interaction Learning via
    Self-Attentive Neural Networks", CIKM 2019, with scaled dot products. No layer has a bias.
    Initial values are Glorot's normal ones.

    Args:
        in_features: width ``N`` of a feature's vector.
        attention_dim: width of its result, of all heads together.
        num_heads: heads, of ``d = attention_dim / num_heads`` columns.
        device: where to make the parameters.

    Raises:
        ValueError: where ``attention_dim`` is no multiple of ``num_heads``.
    """

    def __init__(
        self,
        in_features: int,
        attention_dim: int,
        num_heads: int,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or attention_dim % num_heads:
            raise ValueError(
                f"attention_dim must be a multiple of num_heads, got {attention_dim} and "
                f"{num_heads}"
            )
        # Queries, keys, values and the residual part in one product.
        self.projections = nn.Parameter(torch.empty(4, attention_dim, in_features, device=device))
        self._num_heads = num_heads
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values."""
        for projection in self.projections.unbind():
            nn.init.xavier_normal_(projection)

    def forward(self, vectors: Tensor) -> Tensor:
        """``[B, F, N]`` to ``[B, F, attention_dim]``."""
        projected = F.linear(vectors, self.projections.flatten(0, 1))
        *heads, residual = projected.chunk(4, dim=2)
        query, key, value = (x.unflatten(2, (self._num_heads, -1)).transpose(1, 2) for x in heads)
        attended = F.scaled_dot_product_attention(query, key, value)
        return (attended.transpose(1, 2).flatten(2) + residual).relu()
