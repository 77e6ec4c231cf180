"""Modules of one table each, whose rows may live in host memory, and batches for them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchembed import Dynamic, Embedding, EmbeddingBag
from torchembed.optim import Adam
from torchembed.tables import Storage

NUM_IDS, DIM, PADDING = 40, 4, 2
Batch = dict[str, Tensor]


class StoredModules(nn.Module):
    """A loss from every pooling and from sequences, with and without padding, of ids in rows,
    between offsets and with weights; a module is called twice."""

    tables: Any

    def __init__(
        self,
        storage: Storage | None,
        device: str | None = None,
        dtype: torch.dtype | None = None,
        dynamic: Dynamic | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        settings: dict[str, Any] = {"device": device, "dtype": dtype}
        settings |= {"storage": storage, "dynamic": dynamic}
        padded = {**settings, "padding_idx": PADDING}
        self.tables = nn.ModuleList(
            [
                EmbeddingBag(NUM_IDS, DIM, mode="sum", seed=0, **padded),
                EmbeddingBag(NUM_IDS, DIM, mode="mean", seed=1, **padded),
                EmbeddingBag(NUM_IDS, DIM, mode="max", seed=2, **padded),
                Embedding(NUM_IDS, DIM, seed=3, **padded),
                EmbeddingBag(NUM_IDS, DIM, mode="sum", seed=4, **settings),
                Embedding(NUM_IDS, DIM, seed=5, **settings),
            ]
        )
        self.dense = nn.Linear(DIM, 1)

    def forward(self, batch: Batch) -> Tensor:
        tables, ids, offsets = self.tables, batch["ids"], batch["offsets"]
        found = [tables[number](ids) for number in range(3)]
        found += [tables[number](ids).sum(1) for number in (3, 5)]
        found.append(tables[4](batch["list"], offsets, batch["weights"]))
        found.append(tables[0](batch["list"], offsets))
        return self.dense(torch.cat(found).float()).square().mean()


def batches(count: int, first: int = 0, stride: int = 1) -> Iterator[Batch]:
    """Every ``stride``-th of batches without end: twelve ids, which are others with each batch, and
    bags, the first of which is empty."""
    for seed in range(first, first + count * stride, stride):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(12, (21,), generator=generator)
        ids = torch.where(ids == 0, PADDING, (ids + 2 * seed) % NUM_IDS)
        yield {
            "ids": ids[:12].view(4, 3),
            "list": ids[12:],
            "offsets": torch.tensor([0, 0, 4, 5 + seed % 3]),
            "weights": torch.rand(9, generator=generator),
        }


def largest_batch(of: Iterator[Batch]) -> int:
    """The most distinct rows that one module looks up in a batch."""
    return max(torch.cat([b["ids"].flatten(), b["list"]]).unique().numel() for b in of)


def train_by_hand(model: nn.Module, of: Iterator[Batch], kind: Any = Adam) -> list[float]:
    """Train ``model`` by a plain loop; the losses."""
    optimizer, losses = kind.with_dense(model.parameters(), lr=0.05), []
    for batch in of:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
