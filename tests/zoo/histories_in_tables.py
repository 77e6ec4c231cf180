"""Models of histories over tables whose kind the caller chooses: dynamic, or in host memory."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchembed
from tests.zoo.pooled_models import layers
from tests.zoo.sizes import Sizes


class SumsOfSessions(nn.Module):
    """Sums of vectors of a history, of categories and of a target, from two tables.

    Args:
        table: further settings of each table's config, with its number of rows.
    """

    def __init__(self, sizes: Sizes, **table: Any) -> None:
        super().__init__()
        self.tables = torchembed.EmbeddingCollection(
            [
                torchembed.EmbeddingConfig(
                    name=name, embedding_dim=sizes.dim, feature_names=features, **table
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


class ModulesOfHistory(nn.Module):
    """Mean and maximum of a padded history, and the target, by modules of one table.

    Args:
        num_rows: of each table.
        means, maxima, targets: further settings of each module.
    """

    def __init__(
        self,
        sizes: Sizes,
        num_rows: int,
        means: Mapping[str, Any],
        maxima: Mapping[str, Any],
        targets: Mapping[str, Any],
    ) -> None:
        super().__init__()
        dim, bag = sizes.dim, torchembed.EmbeddingBag
        same: dict[str, Any] = {"padding_idx": 0, "device": sizes.device}
        self.means = bag(num_rows, dim, mode="mean", seed=0, **same, **means)
        self.maxima = bag(num_rows, dim, mode="max", seed=1, **same, **maxima)
        self.targets = torchembed.Embedding(num_rows, dim, seed=2, **same, **targets)
        self.deep = layers(3 * dim, sizes.hidden, 1)

    def forward(self, batch: Any) -> Tensor:
        vectors = [self.means(batch.items), self.maxima(batch.items), self.targets(batch.target)]
        logits = self.deep(torch.cat(vectors, dim=1))[:, 0]
        return F.binary_cross_entropy_with_logits(logits, batch.label)
