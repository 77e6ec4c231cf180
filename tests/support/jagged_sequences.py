"""Models with a vector for each id of jagged histories, beside pooled tags and fixed items, and how
they are trained."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchembed
from torchembed.core.lookup_results import JaggedTensor
from torchembed.training import TrainPipeline

NUM_ROWS, DIM, LONGEST, NUM_SAMPLES = 31, 4, 5, 8


def make_batch(seed: int, times: int = 1) -> dict[str, Any]:
    """Jagged histories and tags, of as many times the ids; a fixed number of items; labels."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(LONGEST + 1, (2 * NUM_SAMPLES,), generator=generator) * times
    ids = torch.randint(NUM_ROWS, (int(lengths.sum()),), generator=generator)
    jagged = torchembed.SparseFeatures(
        keys=("history", "tags"),
        values=ids,
        offsets=F.pad(lengths.cumsum(0), (1, 0)),
        batch_size=NUM_SAMPLES,
    )
    fixed = torchembed.SparseFeatures(
        keys=("user", "item"),
        values=torch.randint(NUM_ROWS, (3 * NUM_SAMPLES,), generator=generator),
        hotness=(2, 1),
        batch_size=NUM_SAMPLES,
    )
    labels = torch.randint(2, (NUM_SAMPLES,), generator=generator).float()
    return {"jagged": jagged, "fixed": fixed, "labels": labels}


def unpooled(name: str, num_rows: int, keys: tuple[str, ...]) -> torchembed.EmbeddingConfig:
    return torchembed.EmbeddingConfig(
        name=name, num_embeddings=num_rows, embedding_dim=DIM, feature_names=keys
    )


class Model(nn.Module):
    """A logit from histories, which a subclass makes a vector of for each sample, from pooled tags
    and from items."""

    longest = LONGEST

    def __init__(self, on_bad_id: str = "raise") -> None:
        super().__init__()
        torch.manual_seed(0)
        one, two = ("tags", "history"), ("history",)
        self.items = torchembed.EmbeddingCollection(
            [unpooled("a", NUM_ROWS, one), unpooled("b", NUM_ROWS + 1, two)], on_bad_id=on_bad_id
        )
        self.bags = torchembed.EmbeddingBagCollection(
            [
                torchembed.EmbeddingBagConfig(
                    name=key, num_embeddings=NUM_ROWS, embedding_dim=dim, feature_names=(key,)
                )
                for key, dim in (("tags", DIM), ("history", 2 * DIM))
            ],
            on_bad_id=on_bad_id,
        )
        self.of_fixed = torchembed.EmbeddingCollection([unpooled("c", NUM_ROWS, ("user", "item"))])
        self.before, self.after = nn.Linear(DIM, DIM), nn.Linear(7 * DIM, 1)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        found, fixed = self.items(batch["jagged"]), self.of_fixed(batch["fixed"])
        users = fixed["user"].values().view(NUM_SAMPLES, 2 * DIM).sum(1, keepdim=True)
        parts = [
            self.sample(found["history@a"]),
            self.sample(found["history@b"]),
            self.sample(found["tags"]),
            self.bags(batch["jagged"]).values(),
            fixed["item"].values() * users,
        ]
        logits = self.after(torch.cat(parts, dim=1))[:, 0]
        return F.binary_cross_entropy_with_logits(logits, batch["labels"])

    def sample(self, vectors: JaggedTensor) -> Tensor:
        """``[B, D]``."""
        raise NotImplementedError


class SegmentMeans(Model):
    def sample(self, vectors: JaggedTensor) -> Tensor:
        values = self.before(vectors.values()).relu()
        return torch.segment_reduce(values, "mean", offsets=vectors.offsets(), initial=0)


class CumulativeSums(Model):
    def sample(self, vectors: JaggedTensor) -> Tensor:
        sums = F.pad(vectors.values().cumsum(0), (0, 0, 1, 0))
        offsets = vectors.offsets()
        return sums[offsets[1:]] - sums[offsets[:-1]]


class Attention(Model):
    def sample(self, vectors: JaggedTensor) -> Tensor:
        mask = torch.arange(self.longest) < vectors.lengths().unsqueeze(1)
        dense = vectors.to_padded_dense(self.longest)
        keys = self.before(dense)
        scores = (keys @ keys.mT).masked_fill(~mask.unsqueeze(1), -1e9).softmax(2)
        return (scores @ dense * mask.unsqueeze(2)).sum(1)


class LongAttention(Attention):
    longest = 100 * LONGEST


def optimizers_of(model: nn.Module, kind: str = "Adagrad") -> list[torch.optim.Optimizer]:
    if kind == "torch":
        return [torch.optim.Adagrad(model.parameters(), lr=0.05)]
    return [getattr(torchembed.optim, kind).with_dense(model.parameters(), lr=0.05)]


def by_hand(model: nn.Module, batches: list[Any], kind: str = "Adagrad") -> list[float]:
    optimizers, losses = optimizers_of(model, kind), []
    for batch in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def by_pipeline(
    model: nn.Module, batches: list[Any], kind: str = "Adagrad"
) -> tuple[list[float], list[str]]:
    """Losses, and the kind of each step in words."""
    losses, kinds, iterator = [], [], iter(batches)
    with TrainPipeline(model, None, optimizers_of(model, kind), capture=True) as pipeline:
        for _ in batches:
            result = pipeline.progress(iterator)
            losses.append(result.loss.item())
            kinds.append(str(result.kind))
    return losses, kinds
