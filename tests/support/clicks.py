"""Batches of named features as Python lists, as each library's batch, and pooled by a formula."""

import dataclasses
import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from torchembed import SparseFeatures


def import_torchrec() -> Any:
    """TorchRec, or a skip where it is not installed. Its import warns of much that it misses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torchrec", reason="compares with TorchRec: not installed")


@dataclasses.dataclass(frozen=True)
class Clicks:
    """``bags[feature][sample]`` are ids; ``weights`` likewise, one for each id."""

    bags: dict[str, list[list[int]]]
    weights: dict[str, list[list[float]]]

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.bags)

    @property
    def batch_size(self) -> int:
        return len(next(iter(self.bags.values())))

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(bag) for bags in self.bags.values() for bag in bags]).long()

    def values(self) -> Tensor:
        return torch.tensor([i for bags in self.bags.values() for bag in bags for i in bag]).long()

    def flat_weights(self) -> Tensor:
        parts = [w for feature in self.bags for bag in self.weights[feature] for w in bag]
        return torch.tensor(parts, dtype=torch.float32)

    def reordered(self, keys: Sequence[str]) -> "Clicks":
        return Clicks({k: self.bags[k] for k in keys}, {k: self.weights[k] for k in keys})

    def jagged(
        self, device: torch.device, weights: Tensor | None = None, dtype: torch.dtype = torch.int64
    ) -> SparseFeatures:
        offsets = torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))
        return SparseFeatures(
            keys=self.keys,
            values=self.values().to(device, dtype),
            batch_size=self.batch_size,
            offsets=offsets.to(device, dtype),
            weights=weights,
        )

    def fixed(
        self, device: torch.device, weights: Tensor | None = None, dtype: torch.dtype = torch.int64
    ) -> SparseFeatures:
        return SparseFeatures(
            keys=self.keys,
            values=self.values().to(device, dtype),
            batch_size=self.batch_size,
            hotness=tuple(len(bags[0]) for bags in self.bags.values()),
            weights=weights,
        )

    def kjt(self, device: torch.device, weights: Tensor | None = None) -> Any:
        """TorchRec's ``KeyedJaggedTensor``."""
        kind = import_torchrec().KeyedJaggedTensor
        return kind(
            keys=list(self.keys),
            values=self.values().to(device),
            lengths=self.lengths.to(device),
            weights=weights,
            stride=self.batch_size,
        )


def random_clicks(
    num_ids: Mapping[str, int],
    batch_size: int,
    *,
    hotness: Mapping[str, int] | None = None,
    seed: int = 0,
) -> Clicks:
    """Features by name with ids below ``num_ids``; bags of 0 to 4 ids where ``hotness`` is None."""
    rng = random.Random(seed)
    bags: dict[str, list[list[int]]] = {}
    weights: dict[str, list[list[float]]] = {}
    for name, limit in num_ids.items():
        lengths = [
            rng.randrange(5) if hotness is None else hotness[name] for _ in range(batch_size)
        ]
        bags[name] = [[rng.randrange(limit) for _ in range(length)] for length in lengths]
        weights[name] = [[rng.gauss(0, 1) for _ in bag] for bag in bags[name]]
    return Clicks(bags, weights)


def pooled(
    clicks: Clicks,
    slots: Sequence[tuple[Tensor, str, str]],
    flat_weights: Tensor | None = None,
) -> Tensor:
    """``[B, sum of dims]`` for slots of (weight, feature, "sum" or "mean"), one bag at a time.

    In the dtype of the weights; autograd differentiates it.
    """
    first = {}
    position = 0
    for feature, bags in clicks.bags.items():
        first[feature] = position
        position += sum(map(len, bags))
    columns = []
    for weight, feature, pooling in slots:
        position = first[feature]
        rows = []
        for bag in clicks.bags[feature]:
            vectors = weight[torch.tensor(bag, dtype=torch.int64)]
            if flat_weights is not None:
                vectors = vectors * flat_weights[position : position + len(bag)].unsqueeze(1)
            total = vectors.sum(0)
            rows.append(total / len(bag) if pooling == "mean" and bag else total)
            position += len(bag)
        columns.append(torch.stack(rows) if rows else weight.new_zeros(0, weight.shape[1]))
    return torch.cat(columns, dim=1)
