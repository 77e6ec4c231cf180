"""Rows of a data set that fits in memory, and batches of them."""

import dataclasses
import math
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from torchembed import SparseFeatures
from torchembed.core.trees import Tree, map_tensors, tensors_in
from torchembed.data import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneIdEach:
    """A feature with one id for each row."""

    raw_ids: Tensor
    """int64: the data's own id of each different value, in the order of their numbers."""
    ids: Tensor
    """int64 ``[N]``: numbers of values, or what stands for them."""

    @property
    def num_ids(self) -> int:
        """The number of different values."""
        return len(self.raw_ids)

    def mapped(self, ids: Tensor) -> "OneIdEach":
        """The feature with ``ids[n]``, int64, for value number n."""
        return dataclasses.replace(self, ids=ids[self.ids])

    def of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The ids of ``rows [B]``, one row after the other, and the number of ids of each."""
        return self.ids[rows], torch.ones_like(rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BagEach:
    """A feature with a bag of ids for each row, the same bag for many rows."""

    raw_ids: Tensor
    """int64: the data's own id of each different value, in the order of their numbers."""
    values: Tensor
    """int64: numbers of the values, or what stands for them, of one different bag after the
    other."""
    offsets: Tensor
    """int64 ``[bags + 1]``: where each bag begins in ``values``."""
    which: Tensor
    """int64 ``[N]``: each row's bag."""

    @property
    def num_ids(self) -> int:
        """The number of different values."""
        return len(self.raw_ids)

    def mapped(self, ids: Tensor) -> "BagEach":
        """The feature with ``ids[n]``, int64, for value number n."""
        return dataclasses.replace(self, values=ids[self.values])

    def of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The ids of ``rows [B]``, one row after the other, and the number of ids of each."""
        bags = self.which[rows]
        starts = self.offsets[bags]
        lengths = self.offsets[bags + 1] - starts
        ends = lengths.cumsum(0)
        shifts = (starts - ends + lengths).repeat_interleave(lengths)
        return self.values[torch.arange(len(shifts)) + shifts], lengths


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """All rows of a data set."""

    features: Mapping[str, OneIdEach | BagEach]
    labels: Tree
    """float32 ``[N]``, 0 or 1; of several tasks a mapping with one for each."""
    dense: Tensor | None = None
    """float32 ``[N, num_dense]``; None where there are no dense features."""

    def __len__(self) -> int:
        return len(tensors_in(self.labels)[0])

    @property
    def num_dense(self) -> int:
        """The number of dense features."""
        return 0 if self.dense is None else self.dense.shape[1]

    def mapped(self, ids: Mapping[str, Tensor]) -> "Rows":
        """The same rows with ``ids[name][n]``, int64, for value number n of feature ``name``."""
        features = {name: feature.mapped(ids[name]) for name, feature in self.features.items()}
        return dataclasses.replace(self, features=features)

    def batch(self, rows: Tensor) -> Batch:
        """The rows numbered ``rows [B]``."""
        features = [feature.of(rows) for feature in self.features.values()]
        values, lengths = (torch.cat(column) for column in zip(*features, strict=True))
        is_jagged = any(isinstance(feature, BagEach) for feature in self.features.values())
        sparse = SparseFeatures(
            keys=tuple(self.features),
            values=values,
            batch_size=len(rows),
            offsets=F.pad(lengths.cumsum(0), (1, 0)) if is_jagged else None,
            hotness=None if is_jagged else (1,) * len(self.features),
        )
        labels = map_tensors(lambda of_all: of_all[rows], self.labels)
        dense = torch.empty(len(rows), 0) if self.dense is None else self.dense[rows]
        return Batch(dense, sparse, labels)


class RowBatches:
    """One rank's batches of some rows: each global batch is divided evenly among the ranks.

    Args:
        rows: the data set.
        numbers: which of its rows, in order, int64 ``[n]``.
        batch_size: over all ranks.
        rank: this rank.
        num_ranks: how many there are.
    """

    def __init__(
        self, rows: Rows, numbers: Tensor, *, batch_size: int, rank: int, num_ranks: int
    ) -> None:
        self.rows, self.numbers = rows, numbers
        self.batch_size, self.rank, self.num_ranks = batch_size, rank, num_ranks

    def __len__(self) -> int:
        return math.ceil(len(self.numbers) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for numbers in self.numbers.split(self.batch_size):
            yield self.rows.batch(numbers.tensor_split(self.num_ranks)[self.rank])
