"""Exchange of pooled vectors by push: stores into the memory of their samples' ranks, and back."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchembed.core.copies.columns import ColumnCopy
from torchembed.core.copies.rectangles import RectangleCopy, joined_moves
from torchembed.core.function_context import FunctionContext
from torchembed.ops.pooled_lookup import LookupInputs, LookupStore
from torchembed.sharding.transport.channel import Channel, PushDomain
from torchembed.sharding.transport.columns import place_in, taken_from
from torchembed.sharding.transport.layout import Layout
from torchembed.sharding.transport.narrowing import float16_scale
from torchembed.sharding.wire import WirePrecision, narrow_dtype


class ReceivedColumns(NamedTuple):
    """Columns of all ranks' blocks in the vectors that a rank receives: ordered by
    part, and within a part by the rank of the shard."""

    columns: list[list[int]]
    """The first column of each rank's blocks."""
    widths: list[list[int]]
    """Columns of each shard of each part."""

    @property
    def num_columns(self) -> int:
        """Columns of a received vector."""
        return sum(sum(of_part) for of_part in self.widths)


def received_columns(layout: Layout) -> ReceivedColumns:
    """The columns at which the blocks of ``layout`` are received."""
    columns = [[0] * len(blocks) for blocks in layout.blocks]
    widths: list[list[int]] = [[] for _ in range(layout.num_parts)]
    in_order = sorted(
        (block.part, rank, number)
        for rank, blocks in enumerate(layout.blocks)
        for number, block in enumerate(blocks)
    )
    end = 0
    for part, rank, number in in_order:
        width = layout.blocks[rank][number].num_columns
        columns[rank][number] = end
        widths[part].append(width)
        end += width
    return ReceivedColumns(columns, widths)


def forward_moves(
    layout: Layout, batch_sizes: Sequence[int], rank: int, blocks: Sequence[int]
) -> list[RectangleCopy]:
    """Moves from the ``[all samples, columns]`` of some of this rank's ``blocks`` to the
    ``[samples, all columns]`` of every rank, as :class:`ReceivedColumns` orders them."""
    received, num_ranks = received_columns(layout), layout.num_ranks
    starts = [0, *itertools.accumulate(batch_sizes)]
    moves, column = [], 0
    for number in blocks:
        width, target = layout.blocks[rank][number].num_columns, received.columns[rank][number]
        # Each rank begins with the one after it, so that not all store into the same one at once.
        for distance in range(1, num_ranks + 1):
            peer = (rank + distance) % num_ranks
            size = batch_sizes[peer]
            moves.append(
                RectangleCopy(peer, size, width, starts[peer], column, target, received.num_columns)
            )
        column += width
    return moves


def backward_moves(
    layout: Layout, batch_sizes: Sequence[int], rank: int, sources: Sequence[Sequence[int | None]]
) -> list[RectangleCopy]:
    """Moves from this rank's ``[samples, columns]`` to the ``[all samples, columns]`` of every
    rank, whose blocks are neighbouring columns.

    Args:
        sources: the first column of each rank's blocks in the source; None for blocks that are in
            another one.
    """
    num_ranks, start, size = layout.num_ranks, sum(batch_sizes[:rank]), batch_sizes[rank]
    by_peer: list[list[RectangleCopy]] = []
    for distance in range(1, num_ranks + 1):
        peer = (rank + distance) % num_ranks
        blocks = layout.blocks[peer]
        stride, column, moves = sum(block.num_columns for block in blocks), 0, []
        for block, source in zip(blocks, sources[peer], strict=True):
            width, target = block.num_columns, start * stride + column
            if source is not None:
                moves.append(RectangleCopy(peer, size, width, 0, source, target, stride))
            column += width
        by_peer.append(moves)
    # The first block of every rank, then the second: stores to all peers are in flight at once.
    by_block = itertools.zip_longest(*by_peer)
    return [move for moves in by_block for move in moves if move is not None]


class _Segment(NamedTuple):
    """Received columns that go to one place, summed over shards where there are several."""

    first: int
    """First received column."""
    width: int
    """Columns of each shard."""
    place: int
    """First column that they are written to."""
    num_shards: int = 1


class GroupVectors(NamedTuple):
    """Pooled vectors of some of a rank's blocks, stored by :meth:`PooledPush.store`."""

    blocks: list[int]
    vectors: Tensor
    """``[all samples, blocks, D]``; zeros, which carry the gradients."""


class PooledPush:
    """Pushes the pooled vectors of one layout between the ranks of ``domain``.

    Exchanges ``ahead`` of a model's forward and those inside it have channels of their own, since
    they may be on different streams. Exchanges of each kind are in one order on all ranks.

    Args:
        wire: the precision in which vectors and gradients are sent.
        places: the first column of each part, summed over its shards, in the values that
            :meth:`__call__` returns; None for parts that are returned separately.
        num_columns: of the values; columns of no part are not written.
        dtype: of the vectors.
    """

    def __init__(
        self,
        layout: Layout,
        domain: PushDomain,
        wire: WirePrecision,
        places: Sequence[int | None],
        num_columns: int,
        dtype: torch.dtype,
    ) -> None:
        self.layout, self.domain, self.wire, self.dtype = layout, domain, wire, dtype
        self.received, self.num_columns = received_columns(layout), num_columns
        self.forward_dtype = narrow_dtype(dtype, wire.forward)
        self.backward_dtype = narrow_dtype(dtype, wire.backward)
        self.value_segments: list[_Segment] = []
        """Segments that go to the values."""
        self.separate_segments: list[_Segment] = []
        """Segments that are returned separately."""
        self._separate: list[tuple[int, list[int]]] = []
        """Parts that are returned separately, with the columns of their shards."""
        first = end = 0
        for part, (place, widths) in enumerate(zip(places, self.received.widths, strict=True)):
            width = sum(widths)
            if place is None:
                self.separate_segments.append(_Segment(first, width, end))
                self._separate.append((part, widths))
                end += width
            else:
                self.value_segments.append(_Segment(first, widths[0], place, len(widths)))
            first += width
        self.num_separate = end
        """Columns that are returned separately."""
        self.widths = [sum(block.num_columns for block in blocks) for blocks in layout.blocks]

    def store(
        self, blocks: Sequence[int], batch_sizes: Sequence[int], *, ahead: bool
    ) -> LookupStore:
        """A store for the lookup of some of this rank's ``blocks``, which comes before
        :meth:`__call__`: it pushes the pooled vectors."""
        sizes = tuple(batch_sizes)
        channel = self.vectors_channel(sizes, ahead)
        moves = forward_moves(self.layout, sizes, self.domain.rank, blocks)

        def store(lookup: LookupInputs) -> None:
            channel.push_lookup(lookup, moves, self.forward_dtype)

        return store

    def __call__(
        self,
        groups: Sequence[GroupVectors],
        batch_sizes: Sequence[int],
        anchor: Tensor | None,
        others: Sequence[tuple[Tensor, Sequence[ColumnCopy]]],
        *,
        ahead: bool,
    ) -> tuple[Tensor, list[tuple[int, list[Tensor]]]]:
        """Receive the values ``[B, num_columns]`` of this rank's samples, and for each part that is
        returned separately the ``[B, columns]`` from each of its shards, in the order of ranks.

        Where gradients are enabled both require one on every rank, since backward is an exchange.

        Args:
            groups: the stored vectors of all of this rank's blocks.
            batch_sizes: samples of each rank.
            anchor: a tensor without elements that ties the exchange to the graph where this rank
                has no vectors.
            others: matrices ``[B, columns]`` that are written to the values too, and where.
            ahead: True for an exchange ahead of the model's forward, as for :meth:`store`.
        """
        # A tensor that requires gradients makes autograd call backward on every rank, also where
        # this one holds no table: backward is an exchange that the others wait for.
        if anchor is None:
            anchor = torch.empty(0, device=self.domain.device)
            anchor.requires_grad_(torch.is_grad_enabled())
        blocks = [group.blocks for group in groups]
        tensors = [group.vectors for group in groups] + [other for other, _ in others]
        copies = [of_other for _, of_other in others]
        values, separate = _Push.apply(
            anchor, self, tuple(batch_sizes), ahead, blocks, copies, *tensors
        )
        columns = iter(separate.split([w for _, widths in self._separate for w in widths], dim=1))
        by_part = [
            (part, list(itertools.islice(columns, len(widths)))) for part, widths in self._separate
        ]
        return values, by_part

    def vectors_channel(self, batch_sizes: tuple[int, ...], ahead: bool) -> Channel:
        """The channel in which vectors arrive."""
        num_elements = max(batch_sizes) * self.received.num_columns
        num_bytes = num_elements * self.forward_dtype.itemsize
        return self.domain.channel((self.layout, "vectors", ahead), num_bytes)

    def gradients_channel(self, batch_sizes: tuple[int, ...], ahead: bool) -> Channel:
        """The channel in which gradients arrive."""
        num_elements = sum(batch_sizes) * max(self.widths)
        num_bytes = num_elements * self.backward_dtype.itemsize
        return self.domain.channel((self.layout, "gradients", ahead), num_bytes)

    def sources_of(self, segments: Sequence[_Segment]) -> list[list[int | None]]:
        """The first column of each rank's blocks in the matrix that ``segments`` go to, None for
        blocks of none of them."""

        def source(column: int) -> int | None:
            for first, width, place, num_shards in segments:
                if first <= column < first + width * num_shards:
                    return place + (column - first) % width
            return None

        return [[source(column) for column in of_rank] for of_rank in self.received.columns]


class _Push(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionContext,
        anchor: Tensor,
        push: PooledPush,
        batch_sizes: tuple[int, ...],
        ahead: bool,
        blocks: list[list[int]],
        copies_of_others: list[Sequence[ColumnCopy]],
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.push, ctx.batch_sizes, ctx.ahead, ctx.blocks = push, batch_sizes, ahead, blocks
        num_samples = batch_sizes[push.domain.rank]
        values = anchor.new_empty(num_samples, push.num_columns, dtype=push.dtype)
        separate = anchor.new_empty(num_samples, push.num_separate, dtype=push.dtype)
        # Local copies first: they overlap with the wait for the other ranks.
        ctx.others = place_in(values, tensors[len(blocks) :], copies_of_others)
        channel = push.vectors_channel(batch_sizes, ahead)
        channel.barrier()
        # One kernel for each number of shards, which it adds in the order of ranks.
        for out, segments in ((values, push.value_segments), (separate, push.separate_segments)):
            for num_shards in sorted({segment.num_shards for segment in segments}):
                moves = [
                    RectangleCopy(
                        0, num_samples, segment.width, 0, segment.first, segment.place, out.shape[1]
                    )
                    for segment in segments
                    if segment.num_shards == num_shards
                ]
                channel.collect(
                    out,
                    joined_moves(moves),
                    push.received.num_columns,
                    push.forward_dtype,
                    num_shards,
                )
        return values, separate

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionContext, values: Tensor, separate: Tensor
    ) -> tuple[Tensor | None, ...]:
        push, batch_sizes = ctx.push, ctx.batch_sizes
        rank, dtype, inverse = push.domain.rank, push.backward_dtype, None
        grads, scale = [values, separate], 1.0 / len(batch_sizes)
        if dtype is torch.float16 and push.dtype is torch.float32:
            moved = torch.cat([_columns(values, push.value_segments), separate], dim=1) * scale
            factor, inverse = float16_scale(moved, push.domain.group)
            # Scaled here and not in the kernel, so that roundings are those of the collective
            # exchange.
            grads, scale = [grad * scale * factor for grad in grads], None
        channel = push.gradients_channel(batch_sizes, ctx.ahead)
        of_grads = push.value_segments, push.separate_segments
        for grad, segments in zip(grads, of_grads, strict=True):
            moves = backward_moves(push.layout, batch_sizes, rank, push.sources_of(segments))
            channel.push(grad, moves, dtype, scale)
        # Local copies between the stores and the barrier, as in forward.
        grads_of_others = taken_from(values, ctx.others)
        channel.barrier()
        received, num_samples = [], sum(batch_sizes)
        mine, stride = push.layout.blocks[rank], push.widths[rank]
        starts = [0, *itertools.accumulate(block.num_columns for block in mine)]
        for of_group in ctx.blocks:
            width = mine[of_group[0]].num_columns
            out = values.new_empty(num_samples, len(of_group), width)
            row = len(of_group) * width
            moves = [
                RectangleCopy(0, num_samples, width, 0, starts[block], place * width, row)
                for place, block in enumerate(of_group)
            ]
            channel.collect(out, joined_moves(moves), stride, dtype)
            received.append(out if inverse is None else out * inverse)
        return values.new_empty(0), *[None] * 5, *received, *grads_of_others


def _columns(matrix: Tensor, segments: Sequence[_Segment]) -> Tensor:
    """The columns of ``matrix`` that ``segments`` go to, side by side."""
    parts = [matrix[:, s.place : s.place + s.width] for s in segments]
    return torch.cat([matrix[:, :0], *parts], dim=1)
