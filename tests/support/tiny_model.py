"""A small model, its batches, and a loss with exact gradients."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

import torchembed
from torchembed.data import Batch
from torchembed.tables import table_of

NUM_ROWS = 23
KEYS = ("f0", "f1")


class TinyModel(nn.Module):
    """One logit from two tables and two dense features.

    It is linear, so that its gradients are exact where the loss's are, or deep, with batch norm.
    """

    def __init__(
        self,
        *,
        is_deep: bool = False,
        device: str | None = None,
        config: Callable[..., torchembed.EmbeddingBagConfig] = torchembed.EmbeddingBagConfig,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = torchembed.EmbeddingBagCollection(
            [
                config(name=key, num_embeddings=NUM_ROWS + i, embedding_dim=4, feature_names=(key,))
                for i, key in enumerate(KEYS)
            ],
            device=device,
        )
        self.is_deep = is_deep
        self.dense = (
            nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
            if is_deep
            else nn.Linear(2, 1)
        )

    def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
        vectors = self.tables(sparse).values()
        if self.is_deep:
            return self.dense(torch.cat([dense, vectors], dim=1))
        return self.dense(dense) + vectors.sum(dim=1, keepdim=True)


def linear_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """With a linear model its gradients are small multiples of powers of two, where batch sizes
    are: exact in whatever order they are summed."""
    return (logits * (2 * labels - 1)).mean()


def make_batch(batch_size: int, seed: int) -> Batch:
    """Jagged ids, dense features that are small integers, labels of either kind."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, (len(KEYS) * batch_size,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    sparse = torchembed.SparseFeatures(
        keys=KEYS,
        values=torch.randint(NUM_ROWS, (int(offsets[-1]),), generator=generator),
        batch_size=batch_size,
        offsets=offsets,
    )
    dense = torch.randint(-2, 3, (batch_size, 2), generator=generator).float()
    labels = (dense[:, 0] + torch.rand(batch_size, generator=generator) > 0.5).float()
    return Batch(dense, sparse, labels)


def make_batches(batch_sizes: Sequence[int], seed: int = 0) -> Iterator[Batch]:
    """A batch of each size; an iterator, so each is given once."""
    return (make_batch(size, 100 * seed + i) for i, size in enumerate(batch_sizes))


def make_optimizers(model: nn.Module, lr: float = 0.125) -> list[torch.optim.Optimizer]:
    """A fused one for the tables, of which a rank may have none, torch's own for the rest."""
    tables = [parameter for parameter in model.parameters() if table_of(parameter) is not None]
    dense = [parameter for parameter in model.parameters() if table_of(parameter) is None]
    of_tables = torchembed.optim.Adagrad([{"params": tables}], lr=lr)
    return [of_tables, torch.optim.Adam(dense, lr=lr)]


def step_by_hand(
    model: nn.Module,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Batch,
) -> Tensor:
    """One step; the loss."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = loss_fn(model(batch.dense, batch.sparse)[:, 0], batch.labels)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.detach()


def fixed_batch(batch_size: int, seed: int, bad: bool = False) -> Batch:
    """Two ids a bag of the first feature, three of the second."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(NUM_ROWS, (batch_size * 5,), generator=generator)
    if bad:
        ids[3] = 99
    sparse = torchembed.SparseFeatures(keys=KEYS, values=ids, batch_size=batch_size, hotness=(2, 3))
    dense = torch.randint(-2, 3, (batch_size, 2), generator=generator).float()
    return Batch(dense, sparse, (dense[:, 0] > 0).float())


def fixed_batches(count: int, batch_size: int = 8, bad: Sequence[int] = ()) -> list[Batch]:
    return [fixed_batch(batch_size, seed, bad=seed in bad) for seed in range(count)]
