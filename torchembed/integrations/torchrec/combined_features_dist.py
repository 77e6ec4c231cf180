"""Exchanges the ids of all shardings of a module at once, with the ranks that look them up."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.sharding.tw_sharding import (
    BaseTwEmbeddingSharding,
    TwSparseFeaturesDist,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchembed.integrations.torchrec.features_dist import FeaturesDist, SplitsAwaitable, permuted
from torchembed.integrations.torchrec.versions import Sharding, process_group

T = TypeVar("T")


class RowWise(NamedTuple):
    """The row-wise sharding of a module, whose features are bucketized over all ranks."""

    index: int
    """Position among the module's shardings."""
    names: list[str]
    """Its features."""
    bucketize: RwSparseFeaturesDist
    """TorchRec's distribution for it, whose exchange is an identity."""


class CombinedFeaturesDist:
    """Sends each rank its features, sharding after sharding, in one exchange; takes no weights.

    A *split* is what one rank gets of one sharding. Splits are sent in the order (rank, sharding).

    Args:
        pg: process group of two ranks or more.
        names: for each sharding and rank, the features that the rank gets.
        row_wise: the row-wise sharding, if there is one.
        input_names: names of the features of batches; each is once among ``names``.
        device: device of the batches.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        names: Sequence[Sequence[Sequence[str]]],
        row_wise: RowWise | None,
        input_names: Sequence[str],
        device: torch.device,
    ) -> None:
        by_rank = list(zip(*names, strict=True))
        self._exchange = FeaturesDist(pg, [sum(map(len, of_rank)) for of_rank in by_rank])
        self._keys = [name for of_rank in by_rank for part in of_rank for name in part]
        self._row_wise = row_wise
        whole = list(_without_row_wise(by_rank, row_wise))
        self._counts = list(map(len, whole))
        """Number of features of each split that is not bucketized."""
        # Features to bucketize come first, so that they are one slice; the others in sending order.
        first = [] if row_wise is None else row_wise.names
        self._num_bucketized = len(first)
        position = {name: number for number, name in enumerate(input_names)}
        self._order = [position[name] for name in itertools.chain(first, *whole)]
        self._is_in_order = self._order == list(range(len(self._order)))
        self._order_tensor = torch.tensor(self._order, dtype=torch.int32, device=device)
        self._begins: tuple[int, Tensor] | None = None

    def __call__(self, features: KeyedJaggedTensor) -> SplitsAwaitable:
        batch_size = features.stride()
        if batch_size and not self._is_in_order:
            features = permuted(features, self._order, self._order_tensor)
        begins = self._split_begins(batch_size, features.device())
        counts = features.offsets()[begins].diff().view(self._exchange.pg.size(), -1)
        bucketized = None
        if self._row_wise is not None:
            index, names, bucketize = self._row_wise
            lengths, values = features.lengths()[: len(names) * batch_size], features.values()
            if not values.is_cuda:
                values = values[: int(lengths.sum())]
            # On a GPU cutting them off would make the host wait; FBGEMM ignores ids past the last
            # bag there, and only there.
            bucketized = bucketize(
                KeyedJaggedTensor(names, values, lengths=lengths, stride=batch_size)
            )
            of_rows = bucketized.lengths().view(counts.shape[0], -1).sum(1, keepdim=True)
            counts = torch.cat([counts[:, :index], of_rows, counts[:, index:]], dim=1)

        def in_order(counts: list[list[int]]) -> KeyedJaggedTensor:
            return self._in_sending_order(features, bucketized, counts)

        return SplitsAwaitable(self._exchange, batch_size, counts.to(torch.int64), in_order)

    def _split_begins(self, batch_size: int, device: torch.device) -> Tensor:
        """First bag of each split that is not bucketized, and the end, int64 ``[splits + 1]``."""
        if self._begins is None or self._begins[0] != batch_size:
            begins = itertools.accumulate(self._counts, initial=self._num_bucketized)
            made = torch.tensor([begin * batch_size for begin in begins])
            # A copy that blocks the host, so that any stream may read the cached tensor later.
            self._begins = batch_size, made.to(device)
        return self._begins[1]

    def _in_sending_order(
        self,
        features: KeyedJaggedTensor,
        bucketized: KeyedJaggedTensor | None,
        counts: list[list[int]],
    ) -> KeyedJaggedTensor:
        """The features, split after split; ``counts`` are the ids of each rank and sharding."""
        lengths, values, batch_size = features.lengths(), features.values(), features.stride()
        if bucketized is not None:
            assert self._row_wise is not None
            of_rows = [of_rank[self._row_wise.index] for of_rank in counts]
            num_values, num_bags = sum(of_rows), self._num_bucketized * batch_size
            values = self._interleaved(
                values[num_values:].split(list(_without_row_wise(counts, self._row_wise))),
                bucketized.values()[:num_values].split(of_rows),
            )
            lengths = self._interleaved(
                lengths[num_bags:].split([count * batch_size for count in self._counts]),
                bucketized.lengths().split([num_bags] * len(of_rows)),
            )
        return KeyedJaggedTensor(self._keys, values, lengths=lengths, stride=batch_size)

    def _interleaved(self, whole: Sequence[Tensor], of_rows: Sequence[Tensor]) -> Tensor:
        """Concatenate splits in sending order: ``whole`` ones, and ``of_rows`` of the row-wise
        sharding, one for each rank."""
        assert self._row_wise is not None
        splits, count = list(whole), len(whole) // len(of_rows) + 1
        for rank, of_rank in enumerate(of_rows):
            splits.insert(rank * count + self._row_wise.index, of_rank)
        return torch.cat(splits)


def _without_row_wise(by_rank: Iterable[Sequence[T]], row_wise: RowWise | None) -> Iterator[T]:
    """Flatten ``by_rank[rank][sharding]``, leaving out the row-wise sharding."""
    for of_rank in by_rank:
        for index, of_sharding in enumerate(of_rank):
            if row_wise is None or index != row_wise.index:
                yield of_sharding


def make_combined_features_dist(
    shardings: Sequence[Sharding], input_names: Sequence[str], device: torch.device
) -> CombinedFeaturesDist | None:
    """Make the distribution that replaces the input distributions of a module's ``shardings``.

    None where a feature is looked up in two shardings, or one of them is neither row-wise,
    table-wise nor column-wise.
    """
    pg = process_group(shardings[0])
    row_wise = None
    names: list[list[list[str]]] = []
    for index, sharding in enumerate(shardings):
        theirs = sharding.create_input_dist()
        if type(theirs) is RwSparseFeaturesDist:
            theirs._dist = nn.Identity()  # type: ignore[assignment]
            row_wise = RowWise(index, sharding.feature_names(), theirs)
            names.append([row_wise.names] * pg.size())
        elif type(theirs) is TwSparseFeaturesDist:
            assert isinstance(sharding, BaseTwEmbeddingSharding)
            names.append(sharding.feature_names_per_rank())
        else:
            return None
    used = [name for sharding in shardings for name in sharding.feature_names()]
    if sorted(used) != sorted(input_names) or len(set(used)) < len(used):
        return None
    return CombinedFeaturesDist(pg, names, row_wise, input_names, device)
