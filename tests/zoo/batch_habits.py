"""Batches of classes of users' own, and what models do with their batches."""

import dataclasses
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tests.zoo.batches import pairs
from tests.zoo.entries import Family
from tests.zoo.sequence_models import OfPairs
from tests.zoo.sizes import Sizes

BATCHES = Family("batches")


@BATCHES.model("labels taken out of the batch", pairs, computes_loss=True)
class TakesLabels(OfPairs):
    """The rest of the batch is what layers are called with."""

    def score(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.users(user) * self.items(item)).sum(1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        label = batch.pop("label")
        return F.binary_cross_entropy_with_logits(self.score(**batch), label)


@BATCHES.model("scores added to the batch", pairs, computes_loss=True)
class AddsScores(OfPairs):
    """Parts of the model leave what they find in the batch, where others read it."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        batch["user"] = batch["user"].clamp(max=20)
        batch["score"] = (self.users(batch["user"]) * self.items(batch["item"])).sum(1)
        return F.binary_cross_entropy_with_logits(batch["score"], batch["label"])


class Record(dict[str, Any]):
    """Items as attributes, by the shortest way to write it."""

    __getattr__ = dict.__getitem__


def records(sizes: Sizes, count: int) -> list[Record]:
    """Pairs as records."""
    return [Record(pair) for pair in pairs(sizes, count)]


@BATCHES.model("items that are attributes too", records, computes_loss=True)
class OfRecords(OfPairs):
    """A dict with attributes."""

    def forward(self, batch: Record) -> Tensor:
        logits = (self.users(batch.user) * self.items(batch["item"])).sum(1)
        return F.binary_cross_entropy_with_logits(logits, batch.label)


@dataclasses.dataclass
class Impression:
    """A pair that knows which users are new."""

    user: Tensor
    item: Tensor
    label: Tensor

    def __post_init__(self) -> None:
        self.is_new = self.user % 2 == 0


def impressions(sizes: Sizes, count: int) -> list[Impression]:
    """Pairs in a class that computes something of them."""
    return [Impression(**pair) for pair in pairs(sizes, count)]


@BATCHES.model("a batch that computes a mask in its constructor", impressions, computes_loss=True)
class OfImpressions(OfPairs):
    """The mask is of the batch, and in no field."""

    def forward(self, batch: Impression) -> Tensor:
        user = self.users(batch.user) * batch.is_new.unsqueeze(1)
        logits = (user * self.items(batch.item)).sum(1)
        return F.binary_cross_entropy_with_logits(logits, batch.label)
