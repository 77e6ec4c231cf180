"""torchembed's own models of histories, over packed ones."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchembed
from tests.support.packed_histories import packed_histories
from tests.zoo.entries import Family
from tests.zoo.sizes import Sizes
from torchembed.models import DIN, HSTU, Histories, Impressions, NextItem, SASRec, TwoTower

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


def shown(sizes: Sizes, count: int) -> list[Impressions]:
    """Two candidates for each of these histories, the first of them chosen."""
    found = []
    for seed, histories in enumerate(packed(sizes, count)):
        generator = torch.Generator().manual_seed(seed)
        shape = sizes.batch_size, 2
        candidates = torch.randint(sizes.num_rows, shape, generator=generator).to(sizes.device)
        labels = torch.tensor([1.0, 0.0], device=sizes.device).expand(shape).clone()
        found.append(Impressions(histories.items, histories.offsets, candidates, labels))
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


@LIBRARY_SEQUENCES.model("torchembed's DIN", shown, computes_loss=True)
class Choosing(nn.Module):
    """Attention of candidates."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        items = torchembed.Embedding(sizes.num_rows, sizes.dim, device=sizes.device, seed=0)
        self.model = DIN(items, embedding_dim=sizes.dim, max_length=sizes.history)

    def forward(self, batch: Impressions) -> Tensor:
        assert batch.labels is not None
        return F.binary_cross_entropy_with_logits(self.model(batch), batch.labels)


@LIBRARY_SEQUENCES.model("torchembed's TwoTower", shown, computes_loss=True)
class Retrieving(nn.Module):
    """Users against the items of a batch."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        items = torchembed.Embedding(sizes.num_rows, sizes.dim, device=sizes.device, seed=0)
        self.model = TwoTower(
            items,
            embedding_dim=sizes.dim,
            max_length=sizes.history,
            layer_sizes=(sizes.hidden, 4),
            item_probabilities=torch.linspace(0, 1, sizes.num_rows),
        )

    def forward(self, batch: Impressions) -> Tensor:
        return self.model(batch)
