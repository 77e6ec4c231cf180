"""``HSTU``: hierarchical sequential transduction units over histories."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchembed.core.padded_dense import padded_dense
from torchembed.models.histories import Histories
from torchembed.models.history_encoder import HistoryEncoder
from torchembed.ops.padded_layout import PaddedLayout

_LOG_SECONDS_OF_A_BUCKET = 0.301
_EPS = 1e-6


class HSTU(HistoryEncoder):
    """Encodes each prefix of a history by blocks of gated, pointwise attention.

    J. Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for
    Generative Recommendations", ICML 2024: a weight of attention is ``silu(q . k + bias) /
    max_length``, without a softmax. The bias is one of the distance of two items and, where the
    batch has times, one of the logarithm of the time from one to the request that follows the
    other. Weights of attention are ``[B, H, max_length, max_length]`` in memory.

    Args:
        items, embedding_dim, max_length, dense_device: as for
            :class:`~torchembed.models.HistoryEncoder`.
        num_blocks: blocks.
        num_heads: heads of each attention, which divide D.
        dropout: dropout rate.
        num_time_buckets: different biases of times: of up to 1 s, then each for times 1.35 times
            as long as those before.

    Raises:
        ValueError: if the heads do not divide D.
    """

    is_earlier: Tensor

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
        if embedding_dim % num_heads:
            raise ValueError(
                f"num_heads must divide embedding_dim {embedding_dim}, got {num_heads}"
            )
        is_earlier = torch.ones(max_length, max_length, dtype=torch.bool, device=dense_device)
        self.register_buffer("is_earlier", is_earlier.tril(), persistent=False)
        self._num_time_buckets = num_time_buckets
        self.blocks = nn.ModuleList(
            _Block(embedding_dim, num_heads, max_length, num_time_buckets, dropout, dense_device)
            for _ in range(num_blocks)
        )

    def forward(self, histories: Histories) -> Tensor:
        """``[L, D]``: each item, encoded with those before it."""
        layout = histories.layout(self.max_length)
        buckets = self._time_buckets(histories, layout)
        x = self.embedded(histories, layout)
        for block in self.blocks:
            x = block(x, layout, self.is_earlier, buckets)
        return x.masked_fill((layout.places < 0).unsqueeze(1), 0.0)

    def _time_buckets(self, histories: Histories, layout: PaddedLayout) -> Tensor | None:
        """int64 ``[B, max_length, max_length]``: the bucket of the time from each item, the last
        dimension, to the request after each."""
        if histories.times is None or histories.next_times is None:
            return None
        times, next_times = (
            padded_dense(of, histories.offsets, self.max_length, 0)
            for of in (histories.times, histories.next_times)
        )
        seconds = (next_times.unsqueeze(2) - times.unsqueeze(1)).abs().clamp_min(1)
        buckets = (seconds.float().log() / _LOG_SECONDS_OF_A_BUCKET).long()
        return buckets.clamp_max(self._num_time_buckets - 1)


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

    def forward(
        self, x: Tensor, layout: PaddedLayout, is_earlier: Tensor, buckets: Tensor | None
    ) -> Tensor:
        dim = x.shape[1:]
        projected = F.silu(self.projections(F.layer_norm(x, dim, eps=_EPS)))
        gate, parts = projected.split([dim[0], 3 * dim[0]], dim=1)
        # The heads come before the three parts, of which each is [B, H, max_length, D / H].
        padded = layout.pad(parts.unflatten(1, (3, self._num_heads, -1))).permute(0, 3, 2, 1, 4)
        value, query, key = padded.unbind(2)
        scores = query @ key.mT + self._distance_biases()
        if buckets is not None:
            of_times = self.time_bias.index_select(0, buckets.flatten())
            scores = scores + of_times.view_as(buckets).unsqueeze(1)
        weights = (F.silu(scores) / len(is_earlier)).masked_fill(~is_earlier, 0.0)
        attended = layout.pack((weights.to(value.dtype) @ value).transpose(1, 2)).flatten(1)
        return x + self.out(self.dropout(gate * F.layer_norm(attended, dim, eps=_EPS)))

    def _distance_biases(self) -> Tensor:
        """``[max_length, max_length]``: the bias of each item's distance to each before it."""
        bias = self.distance_bias
        # Row i of the windows, from the end, begins i places before the item itself.
        return F.pad(bias.flip(0), (0, len(bias) - 1)).unfold(0, len(bias), 1).flip(0)
