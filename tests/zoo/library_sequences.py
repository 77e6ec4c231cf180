"""torchembed's own models of histories, over packed ones."""

from torch import Tensor, nn

import torchembed
from tests.support.packed_histories import packed_histories
from tests.zoo.entries import Family
from tests.zoo.sizes import Sizes
from torchembed.models import HSTU, Histories, NextItem, SASRec

LIBRARY_SEQUENCES = Family("torchembed's sequences")


def packed(sizes: Sizes, count: int) -> list[Histories]:
    """Histories of up to ``sizes.history`` items, with places for as many of each user."""
    found = []
    for seed in range(count):
        lengths = [(3 * user + seed) % (sizes.history + 1) for user in range(sizes.batch_size)]
        spare = sizes.batch_size * sizes.history - sum(lengths)
        histories = packed_histories(
            lengths, num_items=sizes.num_rows, spare=spare, seed=seed, times=True
        )
        found.append(histories.mapped(lambda tensor: tensor.to(sizes.device)))
    return found


class Predicting(nn.Module):
    """Base of the entries: an encoder that is trained to predict the next item."""

    def __init__(self, sizes: Sizes, encoder: type[SASRec] | type[HSTU]) -> None:
        super().__init__()
        items = torchembed.Embedding(sizes.num_rows, sizes.dim, device=sizes.device, seed=0)
        self.model = NextItem(
            encoder(items, embedding_dim=sizes.dim, max_length=sizes.history),
            num_items=sizes.num_rows,
            num_negatives=7,
        )

    def forward(self, batch: Histories) -> Tensor:
        return self.model(batch)


@LIBRARY_SEQUENCES.model("torchembed's SASRec", packed, computes_loss=True)
class PredictingBySASRec(Predicting):
    """Self-attention."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes, SASRec)


@LIBRARY_SEQUENCES.model("torchembed's HSTU", packed, computes_loss=True)
class PredictingByHSTU(Predicting):
    """Pointwise attention with biases of distances and times."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes, HSTU)
