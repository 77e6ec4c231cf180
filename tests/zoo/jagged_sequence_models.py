"""Models over histories of any length that go by offsets, beside pooled features of the same
samples."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchembed
from tests.zoo.batches import jagged_sessions, mixed_sessions
from tests.zoo.entries import Family
from tests.zoo.pooled_models import layers
from tests.zoo.sizes import Sizes
from torchembed.core.lookup_results import JaggedTensor

JAGGED_SEQUENCES = Family("jagged sequences")


class OfSessions(nn.Module):
    """Base of the models: vectors of items, pooled categories, and a logit of both."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.items = torchembed.EmbeddingCollection(
            tables=[
                torchembed.EmbeddingConfig(
                    name="item",
                    num_embeddings=sizes.num_rows,
                    embedding_dim=sizes.dim,
                    feature_names=("target", "history"),
                )
            ],
            device=sizes.device,
        )
        self.categories = torchembed.EmbeddingBagCollection(
            tables=[
                torchembed.EmbeddingBagConfig(
                    name="category",
                    num_embeddings=sizes.num_rows,
                    embedding_dim=sizes.dim,
                    feature_names=("categories",),
                )
            ],
            device=sizes.device,
        )
        self.before = nn.Linear(sizes.dim, sizes.dim)
        self.deep = layers(3 * sizes.dim, sizes.hidden, 1)

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        found = self.items(batch["features"])
        pooled, target = self.categories(batch["features"]).values(), found["target"].values()
        target = target[: self.sizes.batch_size]  # one of each sample
        user = self.user(found["history"], target)
        logits = self.deep(torch.cat([user, target, pooled], dim=1))[:, 0]
        return F.binary_cross_entropy_with_logits(logits, batch["label"]), logits

    def user(self, history: JaggedTensor, target: Tensor) -> Tensor:
        """``[B, D]`` of users, from what they have seen and the ``target [B, D]``."""
        raise NotImplementedError

    def padded(self, history: JaggedTensor) -> tuple[Tensor, Tensor]:
        """Vectors ``[B, T, D]`` and a mask ``[B, T]`` of what they are of."""
        dense = history.to_padded_dense(self.sizes.history)
        mask = torch.arange(dense.shape[1], device=dense.device) < history.lengths().unsqueeze(1)
        return self.before(dense) * mask.unsqueeze(2), mask


@JAGGED_SEQUENCES.model("means of segments", jagged_sessions, computes_loss=True)
class SegmentMeans(OfSessions):
    """The mean of each history's vectors, over the values as they are."""

    def user(self, history: JaggedTensor, target: Tensor) -> Tensor:
        values = F.relu(self.before(history.values()))
        return torch.segment_reduce(values, "mean", offsets=history.offsets(), initial=0)


@JAGGED_SEQUENCES.model("attention over padded histories", jagged_sessions, computes_loss=True)
class PaddedAttention(OfSessions):
    """Attention of the target to histories that forward pads to a fixed length."""

    def user(self, history: JaggedTensor, target: Tensor) -> Tensor:
        dense, mask = self.padded(history)
        scores = (dense * target.unsqueeze(1)).sum(2).masked_fill(~mask, -1e9)
        return ((scores.softmax(dim=1) * mask).unsqueeze(2) * dense).sum(1)


@JAGGED_SEQUENCES.model("histories padded by an index", jagged_sessions, computes_loss=True)
class PaddedByAnIndex(PaddedAttention):
    """As people pad without a method for it; places of no id read any row, and are masked."""

    def padded(self, history: JaggedTensor) -> tuple[Tensor, Tensor]:
        values, offsets = history.values(), history.offsets()
        places = torch.arange(self.sizes.history, device=values.device)
        mask = places < history.lengths().unsqueeze(1)
        index = (offsets[:-1].unsqueeze(1) + places).clamp_max(max(len(values) - 1, 0))
        return self.before(values[index]) * mask.unsqueeze(2), mask


@JAGGED_SEQUENCES.model("one jagged feature of many", mixed_sessions, computes_loss=True)
class OneJaggedOfMany(PaddedAttention):
    """Histories of any length beside targets and categories of fixed hotness, in one batch."""


@JAGGED_SEQUENCES.model("HSTU over jagged histories", jagged_sessions, computes_loss=True)
class JaggedHSTU(OfSessions):
    """Projections of jagged values, pointwise causal attention over padded ones."""

    causal: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.uvqk, self.out = nn.Linear(sizes.dim, 4 * sizes.dim), nn.Linear(sizes.dim, sizes.dim)
        self.register_buffer("causal", torch.ones(sizes.history, sizes.history).tril())

    def user(self, history: JaggedTensor, target: Tensor) -> Tensor:
        dense, mask = self.padded(history)
        u, v, q, k = F.silu(self.uvqk(dense)).chunk(4, dim=2)
        weights = F.silu(q @ k.mT) * self.causal * mask.unsqueeze(1) / self.sizes.history
        x = dense + self.out((weights @ v) * u)
        return (x * mask.unsqueeze(2)).sum(1)


@JAGGED_SEQUENCES.model("dropout over padded histories", jagged_sessions, computes_loss=True)
class DropoutOfPadded(PaddedAttention):
    """Random numbers for each place of a history that forward has padded."""

    def padded(self, history: JaggedTensor) -> tuple[Tensor, Tensor]:
        dense, mask = super().padded(history)
        return F.dropout(dense, 0.2, training=self.training), mask


@JAGGED_SEQUENCES.model("dropout over jagged histories", jagged_sessions, computes_loss=True)
class DropoutOfJagged(SegmentMeans):
    """As many random numbers as there are ids, which differ with spare places."""

    def user(self, history: JaggedTensor, target: Tensor) -> Tensor:
        values = F.dropout(history.values(), 0.2, training=self.training)
        return torch.segment_reduce(values, "mean", offsets=history.offsets(), initial=0)


@JAGGED_SEQUENCES.model("mean of all values", jagged_sessions, computes_loss=True)
class MeanOfAllValues(OfSessions):
    """A vector of the whole batch, which counts the places of the values."""

    def user(self, history: JaggedTensor, target: Tensor) -> Tensor:
        return target * self.before(history.values()).mean(0)


@JAGGED_SEQUENCES.model("sums at numbers of samples", jagged_sessions, computes_loss=True)
class SumsAtSamples(OfSessions):
    """Adds each value to the sample that its place belongs to: one past the last, for a spare."""

    def user(self, history: JaggedTensor, target: Tensor) -> Tensor:
        values, offsets = self.before(history.values()), history.offsets()
        places = torch.arange(len(values), device=values.device)
        sample = torch.searchsorted(offsets, places, right=True) - 1
        return torch.zeros_like(target).index_add(0, sample, values)
