"""A model of histories that are padded to each batch's longest, its batches, and a plain loop."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchembed
from tests.support.tiny_model import NUM_ROWS
from tests.support.tiny_training import assert_same_state, state_of
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


def by_hand(model: nn.Module, batches: Sequence[Batch]) -> list[float]:
    optimizer = torchembed.optim.Adagrad.with_dense(model.parameters(), lr=0.05)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def kinds_as_by_hand(
    batches: Sequence[Batch], make: Callable[[], nn.Module] = OfHistories, **settings: Any
) -> tuple[list[StepKind], TrainPipeline]:
    """The kinds of steps on ``batches``, which equal the plain loop bit by bit, and the pipeline
    that took them; ``settings`` are its own."""
    plain, model = make(), make()
    torch.manual_seed(1)
    losses = by_hand(plain, batches)
    optimizer = torchembed.optim.Adagrad.with_dense(model.parameters(), lr=0.05)
    torch.manual_seed(1)
    with TrainPipeline(model, None, optimizer, capture=True, **settings) as pipeline:
        iterator, found, kinds = iter(batches), [], []
        for _ in batches:
            result = pipeline.progress(iterator)
            # Now: a replay to come writes over it.
            found.append(result.loss.item())
            kinds.append(result.kind)
    assert found == losses
    assert_same_state(model, state_of(plain))
    return kinds, pipeline
