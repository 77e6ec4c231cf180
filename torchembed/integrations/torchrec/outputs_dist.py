"""Exchanges pooled vectors with the ranks whose samples they are, and gradients on the way back.

TorchRec has an exchange for each sharding type, and splits and concatenates its buffers rank by
rank. Here one exchange each way sends a block of all columns that a rank looked up to each rank.
One pass over the received blocks puts columns in order and sums partial vectors; its permutation is
cached.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingDist
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist
from torchrec.distributed.types import Awaitable, CommOp, QuantizedCommCodecs

from torchembed.integrations.torchrec.settings import output_dtype
from torchembed.integrations.torchrec.versions import (
    BaseTwEmbeddingSharding,
    Sharding,
    grouped_configs,
    process_group,
)
from torchembed.integrations.torchrec.wire_precision import wire_precision
from torchembed.sharding.wire import WirePrecision

_MIN_UNIT = 4
"""Fewest columns to permute as one unit; below, the permutation is as large as the vectors."""

_Place = tuple[int, int]
"""A rank, and the index of a unit in the rows of its block."""


class _Permutation(NamedTuple):
    """Indices between received blocks and results of ``batch_size`` samples."""

    batch_size: int
    received: Tensor
    """int64: for the units of the results in order, the received units that are summed to each."""
    ends: Tensor | None
    """int64: offsets into ``received`` of each unit of the results; None where each is of one."""
    sent: Tensor
    """int64: for each unit of gradients to be sent, the unit of the results that it belongs to."""


class OutputsDist:
    """Sends each rank its samples' pooled vectors, from the vectors that the lookups returned.

    A *unit* is a number of adjacent columns that are permuted as one.

    Args:
        pg: process group of the ranks.
        unit: columns of a unit.
        widths: for each rank, the units in a row of its block.
        sources: for each unit of a result, the places whose sum it is.
        dtype: dtype of the vectors.
        codecs: TorchRec's codecs, which round vectors and gradients to 16 bits for the exchange;
            None for an exchange in ``dtype``.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        unit: int,
        widths: Sequence[int],
        sources: Sequence[Sequence[_Place]],
        dtype: torch.dtype,
        codecs: QuantizedCommCodecs | None,
    ) -> None:
        self.pg, self.rank, self.num_ranks = pg, pg.rank(), pg.size()
        self.unit, self.widths, self.sources = unit, list(widths), sources
        self.dtype, self.codecs = dtype, codecs
        self._permutation: _Permutation | None = None

    def __call__(self, vectors: Sequence[Tensor], batch_sizes: Sequence[int]) -> "_Vectors":
        """Begin the exchange of ``vectors``; the awaited result is ``[B, columns]``.

        Args:
            vectors: ``[sum of batch_sizes, columns]`` of each lookup, or one of all lookups.
            batch_sizes: samples of each rank.
        """
        exchange = _Exchange(self, batch_sizes)
        return _Vectors(exchange, _Send.apply(exchange, *vectors))

    def permutation(self, batch_size: int, device: torch.device) -> _Permutation:
        """The permutation for results of ``batch_size`` samples; the last one is cached."""
        if self._permutation is None or self._permutation.batch_size != batch_size:
            self._permutation = self._make_permutation(batch_size, device)
        return self._permutation

    def _make_permutation(self, batch_size: int, device: torch.device) -> _Permutation:
        starts = [0, *itertools.accumulate(self.widths)]
        places = [place for summed in self.sources for place in summed]
        samples = torch.arange(batch_size).unsqueeze(1)
        firsts = torch.tensor([starts[rank] * batch_size + unit for rank, unit in places])
        received = samples * torch.tensor([self.widths[rank] for rank, _ in places]) + firsts
        counts = torch.tensor([len(summed) for summed in self.sources])
        ends = None
        if counts.numel() < len(places):
            ends = torch.cat([counts.new_zeros(1), counts.repeat(batch_size).cumsum(0)])
        results = {p: result for result, summed in enumerate(self.sources) for p in summed}
        sent = [
            samples * len(self.sources) + torch.tensor([results[rank, n] for n in range(width)])
            for rank, width in enumerate(self.widths)
            if width
        ]
        # Copies that block the host, so that any stream may read the cached tensors later.
        return _Permutation(
            batch_size,
            received.flatten().to(device),
            None if ends is None else ends.to(device),
            torch.cat([block.flatten() for block in sent]).to(device),
        )


class _Exchange:
    """State of one batch's exchange: first of its vectors, later of their gradients."""

    def __init__(self, owner: OutputsDist, batch_sizes: Sequence[int]) -> None:
        self.owner = owner
        self.batch_size, self.num_samples = batch_sizes[owner.rank], sum(batch_sizes)
        width = owner.unit * owner.widths[owner.rank]
        self._looked_up = [width * samples for samples in batch_sizes]
        self._results = [owner.unit * self.batch_size * width for width in owner.widths]
        self._work: dist.Work | None = None
        self._received: Tensor | None = None

    def send_vectors(self, vectors: Tensor) -> None:
        self._start(vectors, self._looked_up, self._results)

    def send_gradients(self, gradients: Tensor) -> None:
        self._start(gradients, self._results, self._looked_up)

    def _start(self, tensor: Tensor, sent: list[int], received: list[int]) -> None:
        output = torch.empty(sum(received), dtype=tensor.dtype, device=tensor.device)
        self._work = dist.all_to_all_single(
            output, tensor, received, sent, group=self.owner.pg, async_op=True
        )
        self._received = output

    def receive(self) -> Tensor:
        """Wait for the received tensor; on a GPU the current stream waits, not the host."""
        assert self._work is not None
        self._work.wait()
        received, self._received, self._work = self._received, None, None
        assert received is not None
        if received.is_cuda:
            # Some pipelines await vectors on another stream than the one that allocated them.
            received.record_stream(torch.cuda.current_stream(received.device))
        return received


class _SendContext(Protocol):
    exchange: _Exchange
    columns: list[int]


class _ReceiveContext(Protocol):
    exchange: _Exchange


class _Send(torch.autograd.Function):
    """Sends vectors; its empty result connects the received vectors to the lookups in autograd's
    graph, so that backward receives the gradients here."""

    @staticmethod
    def forward(ctx: _SendContext, exchange: _Exchange, *vectors: Tensor) -> Tensor:
        ctx.exchange = exchange
        ctx.columns = [part.shape[1] for part in vectors]
        some = [part for part in vectors if part.shape[1]]
        if len(some) == 1:
            (block,) = some
        else:
            # TorchRec's lookup returns float32 on a rank without tables, whatever the dtype.
            block = torch.cat(some, dim=1) if some else vectors[0].to(exchange.owner.dtype)
        edge, codecs = block.new_empty(0), exchange.owner.codecs
        if codecs is not None:
            block = codecs.forward.encode(block)
        exchange.send_vectors(block.reshape(-1))
        return edge

    @staticmethod
    def backward(ctx: _SendContext, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        exchange, columns = ctx.exchange, ctx.columns
        gradients, codecs = exchange.receive(), exchange.owner.codecs
        if codecs is not None:
            gradients = codecs.backward.decode(gradients)
        if get_gradient_division():
            gradients.div_(exchange.owner.num_ranks)
        gradients = gradients.view(exchange.num_samples, sum(columns))
        return None, *gradients.split(columns, dim=1)


class _Receive(torch.autograd.Function):
    """Receives vectors and puts their columns in order; backward sends their gradients."""

    @staticmethod
    def forward(ctx: _ReceiveContext, exchange: _Exchange, _: Tensor) -> Tensor:
        ctx.exchange, owner = exchange, exchange.owner
        units = exchange.receive().view(-1, owner.unit)
        order = owner.permutation(exchange.batch_size, units.device)
        if order.ends is None:
            result = units.index_select(0, order.received)
        else:
            result = torch.embedding_bag(
                units, order.received, order.ends, include_last_offset=True
            )[0]
        if owner.codecs is not None:
            result = owner.codecs.forward.decode(result)
        return result.view(exchange.batch_size, owner.unit * len(owner.sources))

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: _ReceiveContext, gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        exchange, owner = ctx.exchange, ctx.exchange.owner
        edge = gradients.new_empty(0)
        order = owner.permutation(exchange.batch_size, gradients.device)
        if owner.codecs is not None:
            gradients = owner.codecs.backward.encode(gradients)
        units = gradients.reshape(-1, owner.unit).index_select(0, order.sent)
        exchange.send_gradients(units.view(-1))
        return None, edge


class _Vectors(Awaitable[Tensor]):
    """Awaits the vectors of this rank's samples, ``[B, columns]``."""

    def __init__(self, exchange: _Exchange, edge: Tensor) -> None:
        super().__init__()
        self._exchange, self._edge = exchange, edge

    def _wait_impl(self) -> Tensor:
        return _Receive.apply(self._exchange, self._edge)


def make_outputs_dist(
    shardings: Sequence[Sharding], dists: Sequence[nn.Module]
) -> OutputsDist | None:
    """Make the distribution that replaces the output ``dists`` of a module's ``shardings``.

    None where a sharding is neither row-wise, table-wise nor column-wise, or where shardings differ
    in dtype or codecs.
    """
    if not dists or any(
        type(theirs) not in (TwPooledEmbeddingDist, RwPooledEmbeddingDist) for theirs in dists
    ):
        return None
    pgs = set(map(process_group, shardings))
    dtypes = set(map(output_dtype, grouped_configs(shardings)))
    codecs = list(map(_codecs_of, shardings, dists))
    wires = {wire_precision({} if each is None else {"": each}) for each in codecs}
    if any(len(found) != 1 for found in (pgs, dtypes, wires, set(map(_loss_scales, codecs)))):
        return None
    (pg,), (dtype,), (wire,) = pgs, dtypes, wires
    is_rounded = wire != WirePrecision()
    if is_rounded and (isinstance(wire, str) or dtype is not torch.float32):
        return None
    # Of each feature of a row-wise sharding, every rank looks up a partial vector.
    is_partial = [type(theirs) is RwPooledEmbeddingDist for theirs in dists]
    dims: list[list[list[int]]] = [
        sharding._emb_dim_per_rank_per_feature()
        if isinstance(sharding, BaseTwEmbeddingSharding)
        else [sharding.embedding_dims()] * pg.size()
        for sharding in shardings
    ]
    unit = math.gcd(*(dim for by_rank in dims for of_rank in by_rank for dim in of_rank))
    if pg.size() == 1 or unit < _MIN_UNIT:
        return None
    # A column-wise table's columns come from several ranks, in another order than its own.
    orders = [getattr(sharding, "_embedding_order", None) for sharding in shardings]
    widths, sources = _layout(dims, is_partial, orders, unit)
    return OutputsDist(pg, unit, widths, sources, dtype, codecs[0] if is_rounded else None)


def _layout(
    dims: Sequence[Sequence[Sequence[int]]],
    is_partial: Sequence[bool],
    orders: Sequence[Sequence[int] | None],
    unit: int,
) -> tuple[list[int], list[tuple[_Place, ...]]]:
    """Compute ``widths`` and ``sources`` of an :class:`OutputsDist`.

    Args:
        dims: for each sharding, rank and feature of it, the columns.
        is_partial: for each sharding, whether all ranks look up the same features, whose vectors
            are summed.
        orders: for each sharding, the order of its features in the results; None for rank by rank.
        unit: a divisor of all ``dims``.
    """
    widths = [0] * len(dims[0])
    sources: list[tuple[_Place, ...]] = []
    for by_rank, partial, order in zip(dims, is_partial, orders, strict=True):
        placed: list[list[list[_Place]]] = []
        """For each rank and feature of it, the places of its units."""
        for rank, of_rank in enumerate(by_rank):
            placed.append([])
            for dim in of_rank:
                end = widths[rank] + dim // unit
                placed[rank].append([(rank, n) for n in range(widths[rank], end)])
                widths[rank] = end
        if partial:
            features = [list(zip(*parts, strict=True)) for parts in zip(*placed, strict=True)]
        else:
            features = [[(place,) for place in units] for rank in placed for units in rank]
        for number in range(len(features)) if order is None else order:
            sources.extend(features[number])
    return widths, sources


def _codecs_of(sharding: Sharding, theirs: nn.Module) -> QuantizedCommCodecs | None:
    """The codecs with which TorchRec's distribution ``theirs`` would exchange."""
    by_row = type(theirs) is RwPooledEmbeddingDist
    ops = CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER
    return (sharding.qcomm_codecs_registry or {}).get(ops[by_row].name)


def _loss_scales(codecs: QuantizedCommCodecs | None) -> tuple[float | None, ...]:
    both = () if codecs is None else (codecs.forward, codecs.backward)
    return tuple(getattr(codec, "_loss_scale", None) for codec in both)
