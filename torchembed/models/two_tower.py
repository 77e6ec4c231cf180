"""``TwoTower``: vectors of users and of items, trained against each other."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchembed.models.impressions import Impressions
from torchembed.models.in_batch_softmax import in_batch_softmax
from torchembed.modules.dense.mlp import MLP


class TwoTower(nn.Module):
    """A tower over the mean of what a user has seen, and one over an item, for retrieval.

    P. Covington et al., "Deep Neural Networks for YouTube Recommendations", RecSys 2016; X. Yi et
    al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations", RecSys
    2019. Trained by :func:`~torchembed.models.in_batch_softmax.in_batch_softmax`: give
    ``TrainPipeline`` no loss function, and one candidate for each user, which it chose.

    Args:
        items: vectors of items, a :class:`~torchembed.Embedding` ``[...] -> [..., D]``.
        embedding_dim: columns ``D`` of a vector.
        max_length: most items of a history; those beyond it are ignored.
        layer_sizes: widths of the layers of each tower.
        temperature: of the softmax.
        item_probabilities: ``[num_items]``: of each item, the part of the samples that chose it,
            for the correction; None for none.
        dense_device: device of the parameters other than the table's.

    Raises:
        ValueError: for no layers, or a ``temperature`` that is not above 0.
    """

    log_probabilities: Tensor | None

    def __init__(
        self,
        items: nn.Module,
        *,
        embedding_dim: int,
        max_length: int,
        layer_sizes: Sequence[int] = (128, 64),
        temperature: float = 0.05,
        item_probabilities: Tensor | None = None,
        dense_device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature must be above 0, got {temperature}")
        self.items, self.max_length, self.temperature = items, max_length, temperature
        self.user_tower, self.item_tower = (
            MLP(embedding_dim, layer_sizes, activation_on_last=False, device=dense_device)
            for _ in range(2)
        )
        logarithms = None
        if item_probabilities is not None:
            # An item that no sample chose is in no batch.
            logarithms = item_probabilities.float().log().clamp_min(-_LARGEST).to(dense_device)
        self.register_buffer("log_probabilities", logarithms, persistent=False)

    def forward(self, impressions: Impressions) -> Tensor:
        """The mean loss ``[]``."""
        chosen = impressions.candidates[:, 0]
        logarithms = self.log_probabilities
        losses = in_batch_softmax(
            self.user_vectors(impressions),
            self.item_vectors(chosen),
            chosen,
            temperature=self.temperature,
            log_probabilities=None if logarithms is None else logarithms[chosen],
        )
        return losses.mean()

    def user_vectors(self, impressions: Impressions) -> Tensor:
        """``[B, layer_sizes[-1]]``: unit vectors of the users."""
        layout = impressions.layout(self.max_length)
        counts = (layout.rows >= 0).sum(1, keepdim=True).clamp_min(1)
        means = layout.pad(self.items(impressions.items)).sum(1) / counts
        return F.normalize(self.user_tower(means).float(), dim=1)

    def item_vectors(self, ids: Tensor) -> Tensor:
        """``[..., layer_sizes[-1]]``: unit vectors of the items ``ids [...]``."""
        return F.normalize(self.item_tower(self.items(ids)).float(), dim=-1)


_LARGEST = 100.0
