"""A model of histories that are padded to each batch's longest, its batches and its steps."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchembed
from tests.support.steps_by_hand import captured_as_by_hand
from tests.support.tiny_model import NUM_ROWS
from torchembed.training import StepKind, TrainPipeline

Batch = dict[str, Any]


class OfHistories(nn.Module):
    """Means of histories, of which 0 is no item; times a number of the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items = torchembed.Embedding(NUM_ROWS, 4, padding_idx=0, seed=0)
        self.recent = torchembed.EmbeddingBag(NUM_ROWS, 4, mode="sum", seed=1)
        self.over = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch: Batch) -> Tensor:
        items, label = batch["items"], batch["label"]
        lengths = (items != 0).sum(1, keepdim=True).clamp(min=1)
        history = self.items(items).sum(1) / lengths
        recent = self.recent(items[:, :2].contiguous() if batch.get("copies") else items[:, :2])
        logits = self.over(torch.cat([history, recent], dim=1))[:, 0] * batch.get("factor", 1)
        return F.binary_cross_entropy_with_logits(logits, label)


def histories(lengths: Sequence[int], **settings: Any) -> list[Batch]:
    """A batch of histories padded to each of ``lengths``."""
    batches = []
    for seed, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(seed)
        items = torch.randint(1, NUM_ROWS, (8, length), generator=generator)
        shown = torch.randint(1, length + 1, (8, 1), generator=generator)
        items[torch.arange(length) >= shown] = 0
        label = torch.randint(2, (8,), generator=generator).float()
        batches.append({"items": items, "label": label, **settings})
    return batches


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torchembed.optim.Adagrad.with_dense(model.parameters(), lr=0.05)]


def kinds_as_by_hand(
    batches: Sequence[Batch], make: Callable[[], nn.Module] = OfHistories, **settings: Any
) -> tuple[list[StepKind], TrainPipeline]:
    """:func:`~tests.support.steps_by_hand.captured_as_by_hand` for models of whole batches that
    return their loss."""
    return captured_as_by_hand(
        make, make_optimizers, batches, None, lambda model, batch: model(batch), **settings
    )
