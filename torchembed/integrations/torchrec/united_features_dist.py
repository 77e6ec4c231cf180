"""Ids of all placements of a module to the ranks that look them up, in one exchange."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.sharding.tw_sharding import TwSparseFeaturesDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchembed.integrations.torchrec.features_dist import FeaturesDist, Sizes, permuted


class RowWise(NamedTuple):
    """The placement of which every rank gets parts of the same features."""

    number: int
    """Among the placements."""
    names: list[str]
    divide: RwSparseFeaturesDist
    """TorchRec's exchange for it, of which all but the exchange is used."""


class UnitedFeaturesDist:
    """Sends each rank its features of one placement after the other; without weights.

    Args:
        pg: the ranks, two or more.
        names: for each placement, what each rank gets.
        row_wise: that placement, if there is one.
        input_names: what features of batches are called, each once among ``names``.
        device: of the batches.
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
        whole = list(_but_row_wise(by_rank, row_wise))
        self._counts = list(map(len, whole))
        """Features of each piece that is sent whole."""
        # Those that are divided first, then rank by rank.
        first = [] if row_wise is None else row_wise.names
        self._num_divided = len(first)
        position = {name: number for number, name in enumerate(input_names)}
        self._order = [position[name] for name in itertools.chain(first, *whole)]
        self._is_in_order = self._order == list(range(len(self._order)))
        self._order_tensor = torch.tensor(self._order, dtype=torch.int32, device=device)
        self._begins: tuple[int, Tensor] | None = None

    def __call__(self, features: KeyedJaggedTensor) -> Sizes:
        batch_size = features.stride()
        if batch_size and not self._is_in_order:
            features = permuted(features, self._order, self._order_tensor)
        begins = self._piece_begins(batch_size, features.device())
        counts = features.offsets()[begins].diff().view(self._exchange.pg.size(), -1)
        divided = None
        if self._row_wise is not None:
            number, names, divide = self._row_wise
            lengths, values = features.lengths()[: len(names) * batch_size], features.values()
            if not values.is_cuda:
                values = values[: int(lengths.sum())]
            # On a GPU the ids of other features follow, which FBGEMM does not look at there.
            divided = divide(KeyedJaggedTensor(names, values, lengths=lengths, stride=batch_size))
            of_rows = divided.lengths().view(counts.shape[0], -1).sum(1, keepdim=True)
            counts = torch.cat([counts[:, :number], of_rows, counts[:, number:]], dim=1)

        def in_order(counts: list[list[int]]) -> KeyedJaggedTensor:
            return self._rank_by_rank(features, divided, counts)

        return Sizes(self._exchange, batch_size, counts.to(torch.int64), in_order)

    def _piece_begins(self, batch_size: int, device: torch.device) -> Tensor:
        """Where the bags of the pieces begin that are sent whole, int64 ``[pieces + 1]``."""
        if self._begins is None or self._begins[0] != batch_size:
            begins = itertools.accumulate(self._counts, initial=self._num_divided)
            made = torch.tensor([begin * batch_size for begin in begins])
            # Copied with a wait of the host, so that any stream may read it from now on.
            self._begins = batch_size, made.to(device)
        return self._begins[1]

    def _rank_by_rank(
        self,
        features: KeyedJaggedTensor,
        divided: KeyedJaggedTensor | None,
        counts: list[list[int]],
    ) -> KeyedJaggedTensor:
        """The features as they are sent, where ``counts`` ids of each placement go to each rank."""
        lengths, values, batch_size = features.lengths(), features.values(), features.stride()
        if divided is not None:
            assert self._row_wise is not None
            of_rows = [of_rank[self._row_wise.number] for of_rank in counts]
            num_values, num_bags = sum(of_rows), self._num_divided * batch_size
            values = self._interleaved(
                values[num_values:].split(list(_but_row_wise(counts, self._row_wise))),
                divided.values()[:num_values].split(of_rows),
            )
            lengths = self._interleaved(
                lengths[num_bags:].split([count * batch_size for count in self._counts]),
                divided.lengths().split([num_bags] * len(of_rows)),
            )
        return KeyedJaggedTensor(self._keys, values, lengths=lengths, stride=batch_size)

    def _interleaved(self, whole: Sequence[Tensor], of_rows: Sequence[Tensor]) -> Tensor:
        """Pieces rank by rank, with those of the row-wise placement in its place."""
        assert self._row_wise is not None
        pieces, count = list(whole), len(whole) // len(of_rows) + 1
        for rank, of_rank in enumerate(of_rows):
            pieces.insert(rank * count + self._row_wise.number, of_rank)
        return torch.cat(pieces)


def _but_row_wise(by_rank: Iterable[Sequence[Any]], row_wise: RowWise | None) -> Iterator[Any]:
    """What there is for each rank and placement, rank by rank."""
    for of_rank in by_rank:
        for number, of_placement in enumerate(of_rank):
            if row_wise is None or number != row_wise.number:
                yield of_placement


def united_features_dist_of(
    shardings: Sequence[Any], input_names: Sequence[str], device: torch.device
) -> UnitedFeaturesDist | None:
    """What stands where the input distributions of all ``shardings`` of a module would, or None
    where it cannot: where a feature goes two ways, or some placement has another exchange."""
    pg: dist.ProcessGroup = shardings[0]._pg
    row_wise = None
    names: list[list[list[str]]] = []
    for number, sharding in enumerate(shardings):
        theirs = sharding.create_input_dist()
        if type(theirs) is RwSparseFeaturesDist:
            theirs._dist = nn.Identity()  # type: ignore[assignment]
            row_wise = RowWise(number, sharding.feature_names(), theirs)
            names.append([row_wise.names] * pg.size())
        elif type(theirs) is TwSparseFeaturesDist:
            names.append(sharding.feature_names_per_rank())
        else:
            return None
    used = [name for sharding in shardings for name in sharding.feature_names()]
    if sorted(used) != sorted(input_names) or len(set(used)) < len(used):
        return None
    return UnitedFeaturesDist(pg, names, row_wise, input_names, device)
