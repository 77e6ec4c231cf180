"""What models do with their batches."""

import torch.nn.functional as F
from torch import Tensor

from tests.zoo.batches import pairs
from tests.zoo.entries import Family
from tests.zoo.sequence_models import OfPairs

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
