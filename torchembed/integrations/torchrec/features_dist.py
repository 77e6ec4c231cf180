"""Exchanges ids with the ranks whose tables look them up; the host waits once for a batch.

TorchRec's ``KJTAllToAll`` makes the host wait for the device to copy numbers there, and to read
lengths before the exchange and after it. Here the splits that both sides need come back through
pinned memory behind one event, and tensors that depend on batch sizes alone are cached.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.dist_data import KJTAllToAllTensorsAwaitable
from torchrec.distributed.embedding_sharding import BaseSparseFeaturesDist
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.types import Awaitable, NoWait
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchembed.integrations.torchrec.versions import exchange_order


class FeaturesDist(BaseSparseFeaturesDist[KeyedJaggedTensor]):
    """Sends each feature, whole, to its rank; for table-wise and column-wise shardings.

    Args:
        pg: process group of the ranks.
        features_per_rank: number of features each rank gets; features come ordered by rank.
    """

    def __init__(self, pg: dist.ProcessGroup, features_per_rank: Sequence[int]) -> None:
        super().__init__()
        self.pg = pg
        self.features_per_rank = list(features_per_rank)
        self._sizes: tuple[int, Tensor, Tensor] | None = None
        self._order: tuple[list[int], Tensor | None] | None = None

    def forward(
        self, sparse_features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        batch_size = sparse_features.stride()
        if self.pg.size() == 1:
            return NoWait(TensorsAwaitable(self, sparse_features, [], [], [batch_size]))
        begins, _ = self.size_tensors(batch_size, sparse_features.device())
        counts = sparse_features.offsets()[begins].diff().to(torch.int64)
        return SplitsAwaitable(self, batch_size, counts.unsqueeze(1), lambda _: sparse_features)

    def size_tensors(self, batch_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """First bag of each rank, int64 ``[W + 1]``, and the batch size for each, int64 ``[W]``."""
        if self._sizes is None or self._sizes[0] != batch_size:
            counts = torch.tensor([0, *self.features_per_rank])
            sizes = torch.full_like(counts[1:], batch_size)
            # A copy that blocks the host, so that any stream may read the cached tensors later.
            begins = (counts.cumsum(0) * batch_size).to(device)
            self._sizes = batch_size, begins, sizes.to(device)
        return self._sizes[1:]

    def order(self, batch_sizes: list[int], device: torch.device) -> Tensor | None:
        """The permutation of received bags from rank-major to feature-major order."""
        if self._order is None or self._order[0] != batch_sizes:
            num_features = self.features_per_rank[self.pg.rank()]
            num_ranks = len(batch_sizes)
            made = exchange_order(num_features, num_ranks, 1, device, batch_sizes)
            self._order = batch_sizes, made
        return self._order[1]


class RowFeaturesDist(BaseSparseFeaturesDist[KeyedJaggedTensor]):
    """Bucketizes each bag by the row ranges of ranks and sends every rank its buckets; for row-wise
    shardings.

    Args:
        pg: process group of the ranks.
        bucketizer: TorchRec's distribution, which bucketizes; its exchange is replaced by a
            :class:`FeaturesDist`.
    """

    def __init__(self, pg: dist.ProcessGroup, bucketizer: RwSparseFeaturesDist) -> None:
        super().__init__()
        exchange = FeaturesDist(pg, [bucketizer._num_features] * pg.size())
        bucketizer._dist = exchange  # type: ignore[assignment]
        # TorchRec's pipelines replace any attribute called _dist, so this one is called otherwise.
        self.bucketizer = bucketizer

    def forward(
        self, sparse_features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        return self.bucketizer(sparse_features)


def permuted(features: KeyedJaggedTensor, order: list[int], tensor: Tensor) -> KeyedJaggedTensor:
    """Equals ``features.permute(order, tensor)`` for an ``order`` of all features, each once, but
    does not read their lengths, for which the host would wait."""
    values = features.values()
    lengths, values, weights = torch.ops.fbgemm.permute_2D_sparse_data(
        tensor,
        features.lengths().view(len(order), features.stride()),
        values,
        features.weights_or_none(),
        values.numel(),
    )
    return KeyedJaggedTensor(
        keys=[features.keys()[number] for number in order],
        values=values,
        weights=weights,
        lengths=lengths.view(-1),
        stride=features.stride(),
    )


class SplitsAwaitable(Awaitable[Awaitable[KeyedJaggedTensor]]):
    """Exchange of the splits: how many ids, and how many samples, each rank sends to each.

    Args:
        owner: the distribution that exchanges.
        batch_size: samples of this rank.
        counts: int64 ``[W, splits]``, ids of each split for each rank; a rank gets one split for
            each sharding.
        features: given ``counts`` on the host, returns the features ordered by receiving rank.
    """

    def __init__(
        self,
        owner: FeaturesDist,
        batch_size: int,
        counts: Tensor,
        features: Callable[[list[list[int]]], KeyedJaggedTensor],
    ) -> None:
        super().__init__()
        self._owner, self._features = owner, features
        _, batch_sizes = owner.size_tensors(batch_size, counts.device)
        totals = counts.squeeze(1) if counts.shape[1] == 1 else counts.sum(1)
        sent = torch.stack([totals, batch_sizes], dim=1)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=owner.pg, async_op=True)
        assert work is not None
        self._event: torch.cuda.Event | None = None
        if not sent.is_cuda:
            self._work, self._numbers = work, (received, counts)
            return
        work.wait()  # makes the stream wait, not the host
        numbers = torch.cat([received, counts], dim=1)
        self._on_host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._on_host.copy_(numbers, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def _wait_impl(self) -> "TensorsAwaitable":
        if self._event is not None:
            self._event.synchronize()
            numbers = self._on_host.tolist()
        else:
            self._work.wait()
            numbers = torch.cat(self._numbers, dim=1).tolist()
        counts = [of_rank[2:] for of_rank in numbers]
        return TensorsAwaitable(
            self._owner,
            self._features(counts),
            [sum(of_rank) for of_rank in counts],
            [of_rank[0] for of_rank in numbers],
            [of_rank[1] for of_rank in numbers],
        )


class TensorsAwaitable(KJTAllToAllTensorsAwaitable):
    """Exchange of lengths, ids and weights; has the attributes of its class that TorchRec reads."""

    def __init__(
        self,
        owner: FeaturesDist,
        features: KeyedJaggedTensor,
        sent: list[int],
        received: list[int],
        batch_sizes: list[int],
    ) -> None:
        Awaitable.__init__(self)
        pg, device = owner.pg, features.device()
        num_features, batch_size = owner.features_per_rank[pg.rank()], features.stride()
        self._workers = pg.size()
        self._input = features
        self._stride_per_rank = batch_sizes
        self._recat = None
        self._input_splits, self._output_splits = {"values": sent}, {"values": received}
        self._input_tensors: list[Tensor] = []
        self._output_tensors: list[Tensor] = []
        self._awaitables: list[dist.Work] = []
        if self._workers == 1:
            return
        first = sum(owner.features_per_rank[: pg.rank()])
        self._keys = features.keys()[first : first + num_features]
        self._recat = owner.order(batch_sizes, device)
        lengths_sent = [count * batch_size for count in owner.features_per_rank]
        self._exchange(
            pg, features.lengths(), lengths_sent, [num_features * b for b in batch_sizes]
        )
        self._exchange(pg, features.values(), sent, received)
        if features.weights_or_none() is not None:
            self._exchange(pg, features.weights(), sent, received)

    def _exchange(
        self, pg: dist.ProcessGroup, tensor: Tensor, sent: list[int], received: list[int]
    ) -> None:
        output = torch.empty(sum(received), dtype=tensor.dtype, device=tensor.device)
        work = dist.all_to_all_single(output, tensor, received, sent, group=pg, async_op=True)
        assert work is not None
        self._awaitables.append(work)
        self._input_tensors.append(tensor)
        self._output_tensors.append(output)

    def _wait_impl(self) -> KeyedJaggedTensor:
        if self._workers == 1:
            return self._input
        for work in self._awaitables:
            work.wait()
        lengths, values, *rest = self._output_tensors
        weights = rest[0] if rest else None
        batch_size, order = self._stride_per_rank[0], self._recat
        if order is not None and any(b != batch_size for b in self._stride_per_rank):
            lengths, values, weights = torch.ops.fbgemm.permute_1D_sparse_data(
                order, lengths, values, weights, values.numel()
            )
        elif order is not None and batch_size:
            lengths, values, weights = torch.ops.fbgemm.permute_2D_sparse_data(
                order, lengths.view(-1, batch_size), values, weights, values.numel()
            )
        return KeyedJaggedTensor(
            keys=self._keys,
            values=values,
            weights=weights,
            lengths=lengths.view(-1),
            stride=sum(self._stride_per_rank),
        )
