"""``NextItem``: trains an encoder of histories to predict what follows each item."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchembed.core.padded_dense import rows_or_zeros
from torchembed.models.histories import Histories
from torchembed.models.history_encoder import HistoryEncoder
from torchembed.models.sampled_softmax import sampled_softmax


class NextItem(nn.Module):
    """An encoder of histories, scored against the item table that it reads them by.

    Trained by :func:`~torchembed.models.sampled_softmax.sampled_softmax` with items drawn uniformly
    for each position, of which those that equal the positive are left out. Give
    ``TrainPipeline`` no loss function: ``forward`` computes the loss. Scores are cosines.

    Args:
        encoder: such as :class:`~torchembed.models.SASRec`.
        num_items: items are numbered from 0 to this; the rows of the table.
        num_negatives: items drawn for each position.
        temperature: of the softmax.

    Raises:
        ValueError: if ``temperature`` is not above 0.
    """

    def __init__(
        self,
        encoder: HistoryEncoder,
        *,
        num_items: int,
        num_negatives: int = 128,
        temperature: float = 0.05,
    ) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature must be above 0, got {temperature}")
        self.encoder, self.num_items = encoder, num_items
        self.num_negatives, self.temperature = num_negatives, temperature

    def forward(self, histories: Histories) -> Tensor:
        """The mean loss ``[]`` over the items of all histories; 0 where there is none."""
        queries = self.encoder(histories)
        positives = histories.next_items
        drawn = torch.randint(
            self.num_items, (len(positives), self.num_negatives), device=positives.device
        )
        losses = sampled_softmax(
            queries,
            self.encoder.items(positives),
            self.encoder.items(drawn),
            drawn == positives.unsqueeze(1),
            temperature=self.temperature,
        )
        is_counted = histories.layout(self.encoder.max_length).places >= 0
        return losses.where(is_counted, 0.0).sum() / is_counted.sum().clamp_min(1)

    def user_vectors(self, histories: Histories) -> Tensor:
        """``[B, D]``: the unit vector of each user after the last item; zeros without any."""
        encoded, offsets = self.encoder(histories), histories.offsets
        last = (offsets[1:] - 1).where(offsets.diff() > 0, -1)
        return F.normalize(rows_or_zeros(encoded, last).float(), dim=1)

    def item_vectors(self, ids: Tensor | None = None) -> Tensor:
        """``[..., D]``: unit vectors of the items ``ids [...]``, or ``[num_items, D]`` of all."""
        if ids is None:
            device = next(self.encoder.parameters()).device
            ids = torch.arange(self.num_items, device=device)
        return F.normalize(self.encoder.items(ids).float(), dim=-1)
