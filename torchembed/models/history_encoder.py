"""``HistoryEncoder``: what encoders of histories have in common."""

import math

import torch
from torch import Tensor, nn

from torchembed.models.histories import Histories
from torchembed.ops.padded_layout import PaddedLayout


class HistoryEncoder(nn.Module):
    """The base of models that encode each item of a history with those before it.

    ``forward`` takes :class:`Histories` and gives ``[L, D]``, zeros for what is not in a history or
    beyond its ``max_length``: cut histories to their newest items before. Layers between attentions
    work on the items of the batch alone, without padding.

    Args:
        items: vectors of items, a :class:`~torchembed.Embedding` ``[...] -> [..., D]``.
        embedding_dim: columns ``D`` of a vector.
        max_length: most items of a history.
        dropout: dropout rate of the sums of items' and positions' vectors.
        dense_device: device of the parameters other than the table's.

    Raises:
        ValueError: if ``max_length`` is below 1.
    """

    def __init__(
        self,
        items: nn.Module,
        *,
        embedding_dim: int,
        max_length: int,
        dropout: float,
        dense_device: torch.device | str | None,
    ) -> None:
        super().__init__()
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        self.items, self.max_length = items, max_length
        self.positions = nn.Parameter(torch.empty(max_length, embedding_dim, device=dense_device))
        std = 1 / math.sqrt(embedding_dim)
        nn.init.trunc_normal_(self.positions, std=std, a=-2 * std, b=2 * std)
        self.dropout = nn.Dropout(dropout)
        self._scale = math.sqrt(embedding_dim)

    def embedded(self, histories: Histories, layout: PaddedLayout) -> Tensor:
        """``[L, D]``: items' vectors times the root of D, with those of their positions."""
        num_users = layout.rows.shape[0]
        positions = layout.pack(self.positions.expand(num_users, -1, -1))
        return self.dropout(self.items(histories.items) * self._scale + positions)
