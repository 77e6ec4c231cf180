"""``HSTU``: hierarchical sequential transduction units over histories."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchembed.models.histories import Histories
from torchembed.models.history_encoder import HistoryEncoder
from torchembed.ops.pointwise_attention import pointwise_attention

_EPS = 1e-6


class HSTU(HistoryEncoder):
    """Encodes each prefix of a history by blocks of gated, pointwise attention.

    J. Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for
    Generative Recommendations", ICML 2024: a weight of attention is ``silu(q . k + bias) /
    max_length``, without a softmax. The bias is one of the distance of two items and, where the
    batch has times, one of the logarithm of the time from one to the request that follows the
    other. Weights of attention are not in memory where kernels of a GPU compute them.

    Args:
        items, embedding_dim, max_length, dense_device: as for
            :class:`~torchembed.models.HistoryEncoder`.
        num_blocks: blocks.
        num_heads: heads of each attention, which divide D.
        dropout: dropout rate.
        num_time_buckets: different biases of times: of up to 1 s, then each for times 1.35 times
            as long as those before.

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
        dropout: float = 0.2,
        num_time_buckets: int = 128,
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
        self.blocks = nn.ModuleList(
            _Block(embedding_dim, num_heads, max_length, num_time_buckets, dropout, dense_device)
            for _ in range(num_blocks)
        )

    def forward(self, histories: Histories) -> Tensor:
        """``[L, D]``: each item, encoded with those before it."""
        layout = histories.layout(self.max_length)
        x = self.embedded(histories, layout)
        for block in self.blocks:
            x = block(x, histories)
        return x.masked_fill((layout.places < 0).unsqueeze(1), 0.0)


class _Block(nn.Module):
    """A unit: projections, attention, a gate."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        max_length: int,
        num_time_buckets: int,
        dropout: float,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.dropout = nn.Dropout(dropout)
        self.projections = nn.Linear(dim, 4 * dim, bias=False, device=device)
        self.out = nn.Linear(dim, dim, device=device)
        self.distance_bias = nn.Parameter(torch.empty(max_length, device=device))
        """Biases of an item on itself, on the one before it, and so on."""
        self.time_bias = nn.Parameter(torch.empty(num_time_buckets, device=device))
        for weight in (self.projections.weight, self.distance_bias, self.time_bias):
            nn.init.normal_(weight, std=0.02)
        nn.init.xavier_uniform_(self.out.weight)

    def forward(self, x: Tensor, histories: Histories) -> Tensor:
        dim = x.shape[1:]
        projected = F.silu(self.projections(F.layer_norm(x, dim, eps=_EPS)))
        gate, *parts = projected.chunk(4, dim=1)
        value, query, key = (part.unflatten(1, (self._num_heads, -1)) for part in parts)
        has_times = histories.times is not None and histories.next_times is not None
        attended = pointwise_attention(
            query,
            key,
            value,
            histories.offsets,
            self.distance_bias,
            time_bias=self.time_bias if has_times else None,
            times=histories.times if has_times else None,
            next_times=histories.next_times if has_times else None,
        )
        normed = F.layer_norm(attended.flatten(1), dim, eps=_EPS)
        return x + self.out(self.dropout(gate * normed))
