"""Pooled vectors to the ranks whose samples they are, and gradients back: one exchange each way.

TorchRec has one for each kind of placement, and cuts and joins what it sends rank by rank. Here a
block of all columns that a rank looked up goes to each rank, and one pass over what came puts
columns in order and sums what several ranks have parts of. Its order is made once.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingDist
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist
from torchrec.distributed.types import Awaitable, CommOp, QuantizedCommCodecs

from torchembed.integrations.torchrec.settings import output_dtype
from torchembed.integrations.torchrec.versions import grouped_configs
from torchembed.integrations.torchrec.wires import Wire, wire_of

_LEAST_UNIT = 4
"""Columns that move together; with fewer, their order would take as much memory as they do."""

_Place = tuple[int, int]
"""A rank, and the number of a unit in each of its rows."""


class _Order(NamedTuple):
    """For results of ``batch_size`` samples."""

    batch_size: int
    received: Tensor
    """The units received that make up those of the results, in turn."""
    ends: Tensor | None
    """Where those of one unit of the results begin and end, if any is a sum of several."""
    sent: Tensor
    """For each unit of gradients to be sent, which one of the results' it is."""


class OutputsDist:
    """Sends each rank its samples' vectors; called on what the lookups gave.

    Args:
        pg: the ranks.
        unit: how many columns move together.
        widths: units in each row of each rank's block.
        sources: for each unit of a result, the places that it is the sum of.
        dtype: of the vectors.
        codecs: TorchRec's, which round vectors and gradients to 16 bits for the way; None without.
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
        self._order: _Order | None = None

    def __call__(self, vectors: Sequence[Tensor], batch_sizes: Sequence[int]) -> "_Vectors":
        """Of ``[sum of batch_sizes, columns]`` from each lookup, or from all at once, results
        ``[B, columns]``."""
        exchange = _Exchange(self, batch_sizes)
        return _Vectors(exchange, _Send.apply(exchange, *vectors))

    def order(self, batch_size: int, device: torch.device) -> _Order:
        if self._order is None or self._order.batch_size != batch_size:
            self._order = self._make_order(batch_size, device)
        return self._order

    def _make_order(self, batch_size: int, device: torch.device) -> _Order:
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
        # Copied with a wait of the host, so that any stream may read them from now on.
        return _Order(
            batch_size,
            received.flatten().to(device),
            None if ends is None else ends.to(device),
            torch.cat([block.flatten() for block in sent]).to(device),
        )


class _Exchange:
    """Vectors on their way, then their gradients."""

    def __init__(self, owner: OutputsDist, batch_sizes: Sequence[int]) -> None:
        self.owner = owner
        self.batch_size, self.num_samples = batch_sizes[owner.rank], sum(batch_sizes)
        width = owner.unit * owner.widths[owner.rank]
        self._looked_up = [width * samples for samples in batch_sizes]
        self._results = [owner.unit * self.batch_size * width for width in owner.widths]
        self._work: Any = None
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
        self._work.wait()  # on a GPU the stream's wait, not the host's
        received, self._received, self._work = self._received, None, None
        assert received is not None
        if received.is_cuda:
            # Some pipelines take vectors on another stream than they look them up on.
            received.record_stream(torch.cuda.current_stream(received.device))
        return received


class _Send(torch.autograd.Function):
    """Gives nothing but an edge of the graph, from the gradients' return to the lookups."""

    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, *vectors: Tensor) -> Tensor:
        ctx.exchange = exchange
        ctx.columns = [part.shape[1] for part in vectors]
        some = [part for part in vectors if part.shape[1]]
        if len(some) == 1:
            (block,) = some
        else:
            # Of a rank without tables, TorchRec's lookup gives another type.
            block = torch.cat(some, dim=1) if some else vectors[0].to(exchange.owner.dtype)
        edge, codecs = block.new_empty(0), exchange.owner.codecs
        if codecs is not None:
            block = codecs.forward.encode(block)
        exchange.send_vectors(block.reshape(-1))
        return edge

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        exchange, columns = ctx.exchange, ctx.columns
        gradients, codecs = exchange.receive(), exchange.owner.codecs
        if codecs is not None:
            gradients = codecs.backward.decode(gradients)
        if get_gradient_division():
            gradients.div_(exchange.owner.num_ranks)
        gradients = gradients.view(exchange.num_samples, sum(columns))
        return None, *gradients.split(columns, dim=1)


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, _: Tensor) -> Tensor:
        ctx.exchange, owner = exchange, exchange.owner
        units = exchange.receive().view(-1, owner.unit)
        order = owner.order(exchange.batch_size, units.device)
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
    def backward(ctx: Any, gradients: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        exchange, owner = ctx.exchange, ctx.exchange.owner
        edge, order = gradients.new_empty(0), owner.order(exchange.batch_size, gradients.device)
        if owner.codecs is not None:
            gradients = owner.codecs.backward.encode(gradients)
        units = gradients.reshape(-1, owner.unit).index_select(0, order.sent)
        exchange.send_gradients(units.view(-1))
        return None, edge


class _Vectors(Awaitable[Tensor]):
    """Results of all columns, ``[B, columns]``."""

    def __init__(self, exchange: _Exchange, edge: Tensor) -> None:
        super().__init__()
        self._exchange, self._edge = exchange, edge

    def _wait_impl(self) -> Tensor:
        return _Receive.apply(self._exchange, self._edge)


def outputs_dist_of(shardings: Sequence[Any], dists: Sequence[Any]) -> OutputsDist | None:
    """What stands where the ``dists`` of all ``shardings`` of a module would, or None where it
    cannot: where some placement has another exchange, or rounds vectors in another way."""
    if not dists or any(
        type(theirs) not in (TwPooledEmbeddingDist, RwPooledEmbeddingDist) for theirs in dists
    ):
        return None
    pgs = {sharding._pg for sharding in shardings}
    dtypes = {output_dtype(c.fused_params or {}) for c in grouped_configs(shardings)}
    codecs = list(map(_codecs_of, shardings, dists))
    wires = {wire_of({} if each is None else {"": each}) for each in codecs}
    if any(len(found) != 1 for found in (pgs, dtypes, wires, set(map(_loss_scales, codecs)))):
        return None
    (pg,), (dtype,), (wire,) = pgs, dtypes, wires
    is_rounded = wire != Wire(None, None)
    if is_rounded and (isinstance(wire, str) or dtype is not torch.float32):
        return None
    # Of each feature of a row-wise placement, every rank has a part.
    is_partial = [type(theirs) is RwPooledEmbeddingDist for theirs in dists]
    dims: list[list[list[int]]] = [
        [sharding.embedding_dims()] * pg.size()
        if partial
        else sharding._emb_dim_per_rank_per_feature()
        for sharding, partial in zip(shardings, is_partial, strict=True)
    ]
    unit = math.gcd(*(dim for by_rank in dims for of_rank in by_rank for dim in of_rank))
    if pg.size() == 1 or unit < _LEAST_UNIT:
        return None
    # Column-wise, a table's columns come from several ranks.
    orders = [getattr(sharding, "_embedding_order", None) for sharding in shardings]
    widths, sources = _layout(dims, is_partial, orders, unit)
    return OutputsDist(pg, unit, widths, sources, dtype, codecs[0] if is_rounded else None)


def _layout(
    dims: Sequence[Sequence[Sequence[int]]],
    is_partial: Sequence[bool],
    orders: Sequence[Sequence[int] | None],
    unit: int,
) -> tuple[list[int], list[tuple[_Place, ...]]]:
    """``widths`` and ``sources`` of an :class:`OutputsDist`.

    Args:
        dims: of each feature on each rank, by placement.
        is_partial: whether all ranks look up the same features, whose vectors are to be summed.
        orders: of the features in the results; None for rank by rank.
        unit: what divides all ``dims``.
    """
    widths = [0] * len(dims[0])
    sources: list[tuple[_Place, ...]] = []
    for by_rank, partial, order in zip(dims, is_partial, orders, strict=True):
        placed: list[list[list[_Place]]] = []
        """For each rank and feature of it, where its units are."""
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


def _codecs_of(sharding: Any, theirs: Any) -> QuantizedCommCodecs | None:
    """Of the exchange ``theirs``."""
    by_row = type(theirs) is RwPooledEmbeddingDist
    ops = CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER
    return (sharding.qcomm_codecs_registry or {}).get(ops[by_row].name)


def _loss_scales(codecs: QuantizedCommCodecs | None) -> tuple[float | None, ...]:
    both = () if codecs is None else (codecs.forward, codecs.backward)
    return tuple(getattr(codec, "_loss_scale", None) for codec in both)
