"""Models of histories and of users and items, as their papers have them."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchembed
from tests.zoo.batches import History, histories, histories_of_any_length, pairs, sessions
from tests.zoo.entries import Family
from tests.zoo.pooled_models import layers
from tests.zoo.sizes import Sizes

SEQUENCES = Family("sequences")


def item_table(sizes: Sizes, seed: int = 0) -> torchembed.Embedding:
    """A vector for each item; row 0 is padding."""
    return torchembed.Embedding(
        sizes.num_rows, sizes.dim, padding_idx=0, device=sizes.device, seed=seed
    )


class OfHistories(nn.Module):
    """Base of the models: a table of items."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.items = item_table(sizes)


@SEQUENCES.model("DIN", histories, computes_loss=True)
class DIN(OfHistories):
    """Attention of the target to the history."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.attention = layers(4 * sizes.dim, sizes.hidden, 1)
        self.deep = layers(2 * sizes.dim, sizes.hidden, 1)

    def forward(self, batch: History) -> Tensor:
        history, target = self.items(batch.items), self.items(batch.target)
        query = target.unsqueeze(1).expand_as(history)
        features = torch.cat([query, history, query - history, query * history], dim=2)
        scores = self.attention(features)[..., 0].masked_fill(batch.items == 0, -1e9)
        interest = (scores.softmax(dim=1).unsqueeze(2) * history).sum(1)
        logits = self.deep(torch.cat([interest, target], dim=1))[:, 0]
        return F.binary_cross_entropy_with_logits(logits, batch.label)


@SEQUENCES.model("DIN, padded to each batch", histories_of_any_length, computes_loss=True)
class DINOfAnyLength(DIN):
    """Histories as long as the longest of the batch."""


@SEQUENCES.model("DIN over a collection", sessions, computes_loss=True)
class DINOfCollection(nn.Module):
    """The history and the target as features of one table of a collection."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.tables = torchembed.EmbeddingCollection(
            tables=[
                torchembed.EmbeddingConfig(
                    name="item",
                    num_embeddings=sizes.num_rows,
                    embedding_dim=sizes.dim,
                    feature_names=("history", "target"),
                )
            ],
            device=sizes.device,
        )
        self.attention = layers(2 * sizes.dim, sizes.hidden, 1)
        self.deep = layers(2 * sizes.dim, sizes.hidden, 1)

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        features, label = batch["features"], batch["label"]
        found = self.tables(features)
        history = found["history"].values().view(-1, self.sizes.history, self.sizes.dim)
        target = found["target"].values()
        query = target.unsqueeze(1).expand_as(history)
        scores = self.attention(torch.cat([query, history], dim=2)).softmax(dim=1)
        logits = self.deep(torch.cat([(scores * history).sum(1), target], dim=1))[:, 0]
        return F.binary_cross_entropy_with_logits(logits, label), logits


@SEQUENCES.model("DIEN", histories, computes_loss=True)
class DIEN(OfHistories):
    """Recurrent interests with attention, by a cell in a Python loop."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.cell = nn.GRUCell(sizes.dim, sizes.dim)
        self.deep = layers(2 * sizes.dim, sizes.hidden, 1)

    def forward(self, batch: History) -> Tensor:
        history, target = self.items(batch.items), self.items(batch.target)
        state = torch.zeros_like(target)
        for step in history.unbind(1):
            weight = (step * target).sum(1, keepdim=True).sigmoid()
            state = weight * self.cell(step, state) + (1 - weight) * state
        logits = self.deep(torch.cat([state, target], dim=1))[:, 0]
        return F.binary_cross_entropy_with_logits(logits, batch.label)


@SEQUENCES.model("BST", histories, computes_loss=True)
class BST(OfHistories):
    """A transformer over the history and the target."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.positions = nn.Embedding(sizes.history + 1, sizes.dim)
        self.block = nn.TransformerEncoderLayer(
            sizes.dim, 2, sizes.hidden, dropout=0.1, batch_first=True
        )
        self.deep = layers(sizes.dim * (sizes.history + 1), sizes.hidden, 1)

    def forward(self, batch: History) -> Tensor:
        ids = torch.cat([batch.items, batch.target.unsqueeze(1)], dim=1)
        x = self.items(ids) + self.positions.weight
        logits = self.deep(self.block(x).flatten(1))[:, 0]
        return F.binary_cross_entropy_with_logits(logits, batch.label)


class CausalAttention(nn.Module):
    """A block of SASRec: causal attention, then two layers."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(sizes.dim) for _ in range(2))
        self.qkv, self.out = nn.Linear(sizes.dim, 3 * sizes.dim), nn.Linear(sizes.dim, sizes.dim)
        self.feed = layers(sizes.dim, sizes.hidden, sizes.dim)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.drop(self.feed(self.norms[1](x)))


@SEQUENCES.model("SASRec", histories, computes_loss=True)
class SASRec(OfHistories):
    """Self-attention that predicts each next item against a drawn negative."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.positions = nn.Parameter(torch.randn(sizes.history, sizes.dim) * 0.1)
        self.blocks = nn.ModuleList(CausalAttention(sizes) for _ in range(2))

    def forward(self, batch: History) -> Tensor:
        x = self.items(batch.items) * math.sqrt(self.sizes.dim) + self.positions
        x = x.masked_fill((batch.items == 0).unsqueeze(2), 0.0)
        for block in self.blocks:
            x = block(x)
        following = torch.cat([batch.items[:, 1:], batch.target.unsqueeze(1)], dim=1)
        drawn = torch.randint_like(following, 1, self.sizes.num_rows)
        positive = (x * self.items(following)).sum(2)
        negative = (x * self.items(drawn)).sum(2)
        losses = F.softplus(-positive) + F.softplus(negative)
        mask = (following != 0).float()
        return (losses * mask).sum() / mask.sum()


@SEQUENCES.model("SASRec, padded to each batch", histories_of_any_length, computes_loss=True)
class SASRecOfAnyLength(SASRec):
    """Histories as long as the longest of the batch."""

    def forward(self, batch: History) -> Tensor:
        missing = self.sizes.history - batch.items.shape[1]
        return super().forward(batch._replace(items=F.pad(batch.items, (missing, 0))))


@SEQUENCES.model("BERT4Rec", histories, computes_loss=True)
class BERT4Rec(OfHistories):
    """Items masked at random are predicted among all, by weights tied to the table's first."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.block = nn.TransformerEncoderLayer(sizes.dim, 2, sizes.hidden, 0.0, batch_first=True)
        self.mask = nn.Parameter(torch.zeros(sizes.dim))
        self.logits = nn.Linear(sizes.dim, min(sizes.num_rows, 1000))

    def forward(self, batch: History) -> Tensor:
        hidden = torch.rand(batch.items.shape, device=batch.items.device) < 0.3
        x = torch.where(hidden.unsqueeze(2), self.mask, self.items(batch.items))
        logits = self.logits(self.block(x))
        wanted = torch.where(hidden, batch.items % logits.shape[2], -100)
        losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
        return losses / hidden.sum().clamp(min=1)


@SEQUENCES.model("GRU4Rec", histories, computes_loss=True)
class GRU4Rec(OfHistories):
    """A recurrent network whose last state is compared with the batch's targets."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.gru = nn.GRU(sizes.dim, sizes.dim, batch_first=True)

    def forward(self, batch: History) -> Tensor:
        states, _ = self.gru(self.items(batch.items))
        scores = states[:, -1] @ self.items(batch.target).T
        return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


@SEQUENCES.model("LSTM of sessions", histories, computes_loss=True)
class Sessions(OfHistories):
    """An LSTM with two layers."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.lstm = nn.LSTM(sizes.dim, sizes.hidden, num_layers=2, batch_first=True, dropout=0.1)
        self.logit = nn.Linear(sizes.hidden, 1)

    def forward(self, batch: History) -> Tensor:
        _, (state, _) = self.lstm(self.items(batch.items))
        return F.binary_cross_entropy_with_logits(self.logit(state[-1])[:, 0], batch.label)


@SEQUENCES.model("HSTU", histories, computes_loss=True)
class HSTU(OfHistories):
    """Pointwise gated attention with a relative bias."""

    distance: Tensor
    causal: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.uvqk = nn.Linear(sizes.dim, 4 * sizes.dim)
        self.out, self.norm = nn.Linear(sizes.dim, sizes.dim), nn.LayerNorm(sizes.dim)
        self.bias = nn.Parameter(torch.zeros(2 * sizes.history - 1))
        places = torch.arange(sizes.history)
        self.register_buffer("distance", places[:, None] - places + sizes.history - 1)
        self.register_buffer("causal", torch.ones(sizes.history, sizes.history).tril())

    def forward(self, batch: History) -> Tensor:
        x = self.items(batch.items)
        u, v, q, k = F.silu(self.uvqk(x)).chunk(4, dim=2)
        weights = F.silu(q @ k.mT + self.bias[self.distance]) * self.causal / x.shape[1]
        x = x + self.out(self.norm(weights @ v) * u)
        scores = F.normalize(x[:, -1], dim=1) @ F.normalize(self.items(batch.target), dim=1).T
        return F.cross_entropy(scores / 0.05, torch.arange(len(scores), device=scores.device))


@SEQUENCES.model("Caser", histories, computes_loss=True)
class Caser(OfHistories):
    """Convolutions over the history."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.along = nn.Conv2d(1, 4, (sizes.history, 1))
        self.across = nn.ModuleList(nn.Conv2d(1, 4, (n, sizes.dim)) for n in (2, 3))
        self.deep = nn.Linear(4 * sizes.dim + 8, sizes.dim)

    def forward(self, batch: History) -> Tensor:
        x = self.items(batch.items).unsqueeze(1)
        found = [self.along(x).flatten(1)]
        found += [layer(x).relu().squeeze(3).amax(dim=2) for layer in self.across]
        user = self.deep(torch.cat(found, dim=1)).relu()
        logits = (user * self.items(batch.target)).sum(1)
        return F.binary_cross_entropy_with_logits(logits, batch.label)


@SEQUENCES.model("YouTube-DNN", histories, computes_loss=True)
class YouTubeDNN(nn.Module):
    """The mean of the history against the batch's targets."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.history = torchembed.EmbeddingBag(
            sizes.num_rows, sizes.dim, mode="mean", padding_idx=0, device=sizes.device, seed=0
        )
        self.targets = item_table(sizes, seed=1)
        self.deep = layers(sizes.dim, sizes.hidden, sizes.dim)

    def forward(self, batch: History) -> Tensor:
        user = self.deep(self.history(batch.items))
        scores = user @ self.targets(batch.target).T
        return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


class OfPairs(nn.Module):
    """Base of models of a user and an item."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.users, self.items = (
            torchembed.Embedding(sizes.num_rows, sizes.dim, device=sizes.device, seed=seed)
            for seed in (0, 1)
        )


@SEQUENCES.model("matrix factorization", pairs, computes_loss=True)
class MatrixFactorization(OfPairs):
    """Products of users and items against pairs at random, as BPR."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        user, item = self.users(batch["user"]), self.items(batch["item"])
        other = item[torch.randperm(len(item), device=item.device)]
        return -F.logsigmoid((user * item).sum(1) - (user * other).sum(1)).mean()


@SEQUENCES.model("NeuMF", pairs, computes_loss=True)
class NeuMF(OfPairs):
    """Products of vectors and layers over others of them."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        half = sizes.dim // 2
        self.num_half = half
        self.deep = layers(2 * half, sizes.hidden, half)
        self.logit = nn.Linear(2 * half, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        user, item = self.users(batch["user"]), self.items(batch["item"])
        product = user[:, : self.num_half] * item[:, : self.num_half]
        deep = self.deep(torch.cat([user[:, self.num_half :], item[:, self.num_half :]], dim=1))
        logits = self.logit(torch.cat([product, deep], dim=1))[:, 0]
        return F.binary_cross_entropy_with_logits(logits, batch["label"])


@SEQUENCES.model("two towers", pairs, computes_loss=True)
class TwoTowers(OfPairs):
    """Softmax within the batch, less the frequency of items, with a learned temperature."""

    counts: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.user_tower = layers(sizes.dim, sizes.hidden, sizes.dim)
        self.item_tower = layers(sizes.dim, sizes.hidden, sizes.dim)
        self.temperature = nn.Parameter(torch.zeros(()))
        self.register_buffer("counts", torch.ones(sizes.num_rows))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        self.counts.index_add_(0, batch["item"], torch.ones_like(batch["label"]))
        user = F.normalize(self.user_tower(self.users(batch["user"])), dim=1)
        item = F.normalize(self.item_tower(self.items(batch["item"])), dim=1)
        scores = user @ item.T * self.temperature.exp() - self.counts[batch["item"]].log()
        return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))
