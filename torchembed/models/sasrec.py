"""``SASRec``: causal self-attention over histories."""

import math

import torch
from torch import Tensor, nn

from torchembed.models.histories import Histories
from torchembed.models.history_encoder import HistoryEncoder
from torchembed.modules.dense.causal_attention import causal_attention
from torchembed.ops.padded_layout import PaddedLayout


class SASRec(HistoryEncoder):
    """Encodes each prefix of a history by blocks of causal self-attention.

    W. Kang and J. McAuley, "Self-Attentive Sequential Recommendation", ICDM 2018, with the
    arrangement of layer norms and the initial values of the baseline of J. Zhai et al., "Actions
    Speak Louder than Words", ICML 2024.

    Args:
        items, embedding_dim, max_length, dense_device: as for
            :class:`~torchembed.models.HistoryEncoder`.
        num_blocks: blocks of attention and feed-forward layers.
        num_heads: heads of each attention, which divide D.
        hidden_dim: width of the feed-forward layers; None for D.
        dropout: dropout rate, of weights of attention too.

    Raises:
        ValueError: if the heads do not divide D, or ``max_length`` is below 1.
    """

    def __init__(
        self,
        items: nn.Module,
        *,
        embedding_dim: int,
        max_length: int,
        num_blocks: int = 2,
        num_heads: int = 1,
        hidden_dim: int | None = None,
        dropout: float = 0.2,
        dense_device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            items,
            embedding_dim=embedding_dim,
            max_length=max_length,
            dropout=dropout,
            dense_device=dense_device,
        )
        if num_heads < 1 or embedding_dim % num_heads:
            raise ValueError(
                f"num_heads must divide embedding_dim {embedding_dim}, got {num_heads}"
            )
        width = embedding_dim if hidden_dim is None else hidden_dim
        self.blocks = nn.ModuleList(
            _Block(embedding_dim, num_heads, width, dropout, dense_device)
            for _ in range(num_blocks)
        )

    def forward(self, histories: Histories) -> Tensor:
        """``[L, D]``: each item, encoded with those before it."""
        layout = histories.layout(self.max_length)
        x = self.embedded(histories, layout)
        for block in self.blocks:
            x = block(x, layout)
        return x.masked_fill((layout.places < 0).unsqueeze(1), 0.0)


class _Block(nn.Module):
    """Attention, whose queries are normalized, and two layers over normalized sums."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        hidden_dim: int,
        dropout: float,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self._num_heads, self._dropout = num_heads, dropout
        self.norm = nn.LayerNorm(dim, eps=1e-8, elementwise_affine=False)
        self.query = nn.Linear(dim, dim, device=device)
        self.key_value = nn.Linear(dim, 2 * dim, device=device)
        self.out = nn.Linear(dim, dim, device=device)
        self.feed_forward = nn.Sequential(
            nn.Linear(dim, hidden_dim, device=device),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden_dim, dim, device=device),
            nn.Dropout(dropout),
        )
        for layer in (self.query, self.key_value):
            # Those of one matrix [3 * dim, dim] by Glorot and Bengio.
            nn.init.normal_(layer.weight, std=1 / math.sqrt(2 * dim))
            nn.init.zeros_(layer.bias)
        nn.init.xavier_normal_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        for layer in self.feed_forward:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_normal_(layer.weight)

    def forward(self, x: Tensor, layout: PaddedLayout) -> Tensor:
        normed = self.norm(x)
        heads = self._num_heads
        query = self.query(normed).unflatten(1, (heads, -1))
        key_value = self.key_value(x).unflatten(1, (2, heads, -1))
        dropout = self._dropout if self.training else 0.0
        attended = causal_attention(query, key_value, layout, dropout=dropout)
        x = self.norm(normed + self.out(attended.flatten(1)))
        return x + self.feed_forward(x)
