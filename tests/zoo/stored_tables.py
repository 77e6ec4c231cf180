"""Models whose tables live in host memory, behind caches that hold some of their rows."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchembed
from tests.zoo.batches import bags, histories, jagged_sessions, keys
from tests.zoo.entries import Case, Family
from tests.zoo.pooled_models import layers
from tests.zoo.ranker import with_adam
from tests.zoo.sizes import Sizes
from torchembed import HostMemory, SparseFeatures

STORED = Family("host memory")


class StoredPooled(nn.Module):
    """Layers over pooled vectors of tables that share a cache."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        # As many rows as a batch has ids.
        storage = HostMemory(cache_rows=min(3 * sizes.batch_size, sizes.num_rows))
        self.tables = torchembed.EmbeddingBagCollection(
            [
                torchembed.EmbeddingBagConfig(
                    name=name,
                    num_embeddings=sizes.num_rows,
                    embedding_dim=sizes.dim,
                    feature_names=(name,),
                    storage=storage,
                )
                for name in keys(sizes)
            ],
            device=sizes.device,
        )
        width = sizes.num_dense + sizes.num_features * sizes.dim
        self.deep = layers(width, sizes.hidden, 1)

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        return self.deep(torch.cat([dense, self.tables(sparse).values()], dim=1))


@STORED.habit("bags in host memory", bags)
def bags_in_host_memory(sizes: Sizes) -> Case:
    """Rows with two states of an optimizer."""
    return with_adam(StoredPooled(sizes))


@STORED.model("history in host memory", jagged_sessions, computes_loss=True)
class StoredHistory(nn.Module):
    """Sums of vectors of a history, of categories and of a target."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tables = torchembed.EmbeddingCollection(
            [
                torchembed.EmbeddingConfig(
                    name=name,
                    num_embeddings=sizes.num_rows,
                    embedding_dim=sizes.dim,
                    feature_names=features,
                    storage=HostMemory(cache_rows=sizes.num_rows * 7 // 8),
                )
                for name, features in (
                    ("item", ("history", "target")),
                    ("category", ("categories",)),
                )
            ],
            device=sizes.device,
        )
        self.deep = layers(3 * sizes.dim, sizes.hidden, 1)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        found, label = self.tables(batch["features"]), batch["label"]
        sums = [
            torch.segment_reduce(part.values(), "sum", offsets=part.offsets().long(), initial=0.0)
            for part in (found[name] for name in ("history", "categories", "target"))
        ]
        return F.binary_cross_entropy_with_logits(self.deep(torch.cat(sums, 1))[:, 0], label)


@STORED.model("modules in host memory", histories, computes_loss=True)
class StoredModulesOfHistory(nn.Module):
    """Mean and maximum of a padded history, and the target, by modules of one table."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        rows, dim, bag = sizes.num_rows, sizes.dim, torchembed.EmbeddingBag
        settings: dict[str, Any] = {
            "padding_idx": 0,
            "device": sizes.device,
            "storage": HostMemory(cache_rows=rows * 7 // 8),
        }
        self.means = bag(rows, dim, mode="mean", seed=0, **settings)
        self.maxima = bag(rows, dim, mode="max", seed=1, **settings)
        self.targets = torchembed.Embedding(rows, dim, seed=2, **settings)
        self.deep = layers(3 * dim, sizes.hidden, 1)

    def forward(self, batch: Any) -> Tensor:
        vectors = [self.means(batch.items), self.maxima(batch.items), self.targets(batch.target)]
        logits = self.deep(torch.cat(vectors, dim=1))[:, 0]
        return F.binary_cross_entropy_with_logits(logits, batch.label)
