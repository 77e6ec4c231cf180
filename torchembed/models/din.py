"""``DIN``: attention of candidates to a history."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchembed.models.impressions import Impressions


class DIN(nn.Module):
    """Logits of candidates, each with a view of its own of what the user has seen.

    G. Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", KDD 2018: layers over
    an item of the history, a candidate, their difference and their product weigh the item, without
    a softmax, so that a user's interest keeps its strength. They work on the items of the batch
    alone, without padding.

    Args:
        items: vectors of items, a :class:`~torchembed.Embedding` ``[...] -> [..., D]``.
        embedding_dim: columns ``D`` of a vector.
        max_length: most items of a history; those beyond it are ignored.
        attention_sizes: widths of the layers that weigh items.
        layer_sizes: widths of the layers over interest, candidate and their product.
        dense_device: device of the parameters other than the table's.
    """

    def __init__(
        self,
        items: nn.Module,
        *,
        embedding_dim: int,
        max_length: int,
        attention_sizes: Sequence[int] = (80, 40),
        layer_sizes: Sequence[int] = (200, 80),
        dense_device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.items, self.max_length = items, max_length
        self.attention = _layers(4 * embedding_dim, attention_sizes, dense_device)
        self.deep = _layers(3 * embedding_dim, layer_sizes, dense_device)

    def forward(self, impressions: Impressions) -> Tensor:
        """``[B, C]``: the logit of each candidate."""
        layout = impressions.layout(self.max_length)
        history, candidates = self.items(impressions.items), self.items(impressions.candidates)
        # Each item with the candidates of its user, [L, C, D].
        query = layout.pack(candidates.unsqueeze(1).expand(-1, self.max_length, -1, -1))
        key = history.unsqueeze(1).expand_as(query)
        features = torch.cat([query, key, query - key, query * key], dim=2)
        weights = layout.pad(self.attention(features).squeeze(2))
        interest = weights.mT @ layout.pad(history).to(weights.dtype)
        features = torch.cat([interest, candidates, interest * candidates], dim=2)
        return self.deep(features).squeeze(2)


def _layers(width: int, sizes: Sequence[int], device: torch.device | str | None) -> nn.Sequential:
    """Linear layers with a PReLU each, and one for a number."""
    widths = [width, *sizes]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after, device=device), nn.PReLU(device=device)]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1, device=device))
