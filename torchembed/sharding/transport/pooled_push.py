"""Pooled vectors by push: into the memory of the ranks whose samples they are, gradients back."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchembed.ops.pooled_lookup import LookupStore
from torchembed.ops.push import Move
from torchembed.sharding.transport.channel import Channel, PushDomain
from torchembed.sharding.transport.columns import Piece, joined_moves, place_in, taken_from
from torchembed.sharding.transport.layout import Layout
from torchembed.sharding.transport.narrowing import float16_scale, narrow_dtype
from torchembed.sharding.wire import WirePrecision


class Home(NamedTuple):
    """Where the blocks of all ranks lie side by side in the vectors that come home: by part, and
    among the shards of one by rank."""

    columns: list[list[int]]
    """The first column of each rank's blocks."""
    widths: list[list[int]]
    """Columns of each shard of each part."""

    @property
    def num_columns(self) -> int:
        return sum(sum(of_part) for of_part in self.widths)


def home_of(layout: Layout) -> Home:
    """The home of a layout's blocks."""
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
    return Home(columns, widths)


def forward_moves(
    layout: Layout, batch_sizes: Sequence[int], rank: int, blocks: Sequence[int]
) -> list[Move]:
    """From the ``[all samples, columns]`` of some of this rank's ``blocks`` to the ``[samples, all
    columns]`` of every rank, as :class:`Home` says. Ranks begin with different ones, so that not
    all store into the same one."""
    home, num_ranks = home_of(layout), layout.num_ranks
    starts = [0, *itertools.accumulate(batch_sizes)]
    moves, column = [], 0
    for number in blocks:
        width, target = layout.blocks[rank][number].num_columns, home.columns[rank][number]
        for turn in range(num_ranks):
            peer = (rank + 1 + turn) % num_ranks
            size = batch_sizes[peer]
            moves.append((peer, size, width, starts[peer], column, target, home.num_columns))
        column += width
    return moves


def backward_moves(
    layout: Layout, batch_sizes: Sequence[int], rank: int, sources: Sequence[Sequence[int | None]]
) -> list[Move]:
    """From this rank's ``[samples, columns]`` to the ``[all samples, columns]`` of every rank, its
    blocks side by side.

    Args:
        sources: the first column of each rank's blocks here; None for those that are elsewhere.
    """
    num_ranks, start, size = layout.num_ranks, sum(batch_sizes[:rank]), batch_sizes[rank]
    by_peer: list[list[Move]] = []
    for turn in range(num_ranks):
        peer = (rank + 1 + turn) % num_ranks
        blocks = layout.blocks[peer]
        stride, column, moves = sum(block.num_columns for block in blocks), 0, []
        for block, source in zip(blocks, sources[peer], strict=True):
            width, target = block.num_columns, start * stride + column
            if source is not None:
                moves.append((peer, size, width, 0, source, target, stride))
            column += width
        by_peer.append(moves)
    return [move for turn in itertools.zip_longest(*by_peer) for move in turn if move is not None]


class _HomePiece(NamedTuple):
    """Columns at home that go to one place: of several shards the sum."""

    first: int
    width: int
    """Of each shard that is summed."""
    place: int
    num_shards: int = 1


class GroupVectors(NamedTuple):
    """The pooled vectors of some of a rank's blocks, which :meth:`PooledPush.store` has stored."""

    blocks: list[int]
    vectors: Tensor
    """``[all samples, blocks, D]``; zeros that get the gradients."""


class PooledPush:
    """Pushes the pooled vectors of one layout over the ranks of ``domain``.

    Exchanges ``ahead`` of a model's forward and those in it have channels of their own, so that the
    ones may be on another stream than the others. Those of a kind come in one order of streams.

    Args:
        wire: the precision in which vectors and gradients travel.
        places: of each part, the sum of its shards' vectors, the first column in the values that
            :meth:`__call__` makes; None for one that the caller has to see to.
        num_columns: of the values; those of no part are left as they are found.
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
        self.home, self.num_columns = home_of(layout), num_columns
        self.forward_dtype = narrow_dtype(dtype, wire.forward)
        self.backward_dtype = narrow_dtype(dtype, wire.backward)
        self.values_pieces: list[_HomePiece] = []
        """To the values."""
        self.staged_pieces: list[_HomePiece] = []
        """To what the caller has to see to."""
        self._staged: list[tuple[int, list[int]]] = []
        """Parts that are the caller's, with the columns of their shards."""
        first = end = 0
        for part, (place, widths) in enumerate(zip(places, self.home.widths, strict=True)):
            width = sum(widths)
            if place is None:
                self.staged_pieces.append(_HomePiece(first, width, end))
                self._staged.append((part, widths))
                end += width
            else:
                self.values_pieces.append(_HomePiece(first, widths[0], place, len(widths)))
            first += width
        self.num_staged = end
        """Columns of those."""
        self.widths = [sum(block.num_columns for block in blocks) for blocks in layout.blocks]

    def store(
        self, blocks: Sequence[int], batch_sizes: Sequence[int], *, ahead: bool
    ) -> LookupStore:
        """Where a lookup stores the vectors of some of this rank's ``blocks``, before
        :meth:`__call__`."""
        sizes = tuple(batch_sizes)
        channel = self.vectors_channel(sizes, ahead)
        moves = forward_moves(self.layout, sizes, self.domain.rank, blocks)

        def store(*lookup: Any) -> None:
            channel.push_lookup(lookup, moves, self.forward_dtype)

        return store

    def __call__(
        self,
        groups: Sequence[GroupVectors],
        batch_sizes: Sequence[int],
        anchor: Tensor | None,
        others: Sequence[tuple[Tensor, Sequence[Piece]]],
        *,
        ahead: bool,
    ) -> tuple[Tensor, list[tuple[int, list[Tensor]]]]:
        """The values ``[B, num_columns]`` of this rank's samples, and for each part that has no
        place there the ``[B, columns]`` from each of its shards, in the order of ranks.

        Where gradients are enabled they require one on every rank.

        Args:
            groups: the pooled vectors of all of this rank's blocks.
            batch_sizes: samples of each rank.
            anchor: without elements; gets a gradient where it requires one.
            others: what has columns among the values too, ``[B, columns]``, and which.
            ahead: as for :meth:`store`.
        """
        if anchor is None:
            anchor = torch.empty(0, device=self.domain.device)
            anchor.requires_grad_(torch.is_grad_enabled())
        blocks = [group.blocks for group in groups]
        tensors = [group.vectors for group in groups] + [other for other, _ in others]
        pieces = [of_other for _, of_other in others]
        values, staged = _Push.apply(
            anchor, self, tuple(batch_sizes), ahead, blocks, pieces, *tensors
        )
        columns = iter(staged.split([w for _, widths in self._staged for w in widths], dim=1))
        by_part = [
            (part, list(itertools.islice(columns, len(widths)))) for part, widths in self._staged
        ]
        return values, by_part

    def vectors_channel(self, batch_sizes: tuple[int, ...], ahead: bool) -> Channel:
        """Where vectors arrive."""
        num_elements = max(batch_sizes) * self.home.num_columns
        num_bytes = num_elements * self.forward_dtype.itemsize
        return self.domain.channel((self.layout, "vectors", ahead), num_bytes)

    def gradients_channel(self, batch_sizes: tuple[int, ...], ahead: bool) -> Channel:
        """Where gradients arrive."""
        num_elements = sum(batch_sizes) * max(self.widths)
        num_bytes = num_elements * self.backward_dtype.itemsize
        return self.domain.channel((self.layout, "gradients", ahead), num_bytes)

    def sources_of(self, pieces: Sequence[_HomePiece]) -> list[list[int | None]]:
        """Where the gradients of each rank's blocks are in what ``pieces`` go to."""

        def source(column: int) -> int | None:
            for first, width, place, num_shards in pieces:
                if first <= column < first + width * num_shards:
                    return place + (column - first) % width
            return None

        return [[source(column) for column in of_rank] for of_rank in self.home.columns]


class _Push(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        push: PooledPush,
        batch_sizes: tuple[int, ...],
        ahead: bool,
        blocks: list[list[int]],
        pieces_of_others: list[Sequence[Piece]],
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.push, ctx.batch_sizes, ctx.ahead, ctx.blocks = push, batch_sizes, ahead, blocks
        num_samples = batch_sizes[push.domain.rank]
        values = anchor.new_empty(num_samples, push.num_columns, dtype=push.dtype)
        staged = anchor.new_empty(num_samples, push.num_staged, dtype=push.dtype)
        # What needs no other rank comes before they are waited for.
        ctx.others = place_in(values, tensors[len(blocks) :], pieces_of_others)
        channel = push.vectors_channel(batch_sizes, ahead)
        channel.meet()
        for out, pieces in ((values, push.values_pieces), (staged, push.staged_pieces)):
            for num_shards in sorted({piece.num_shards for piece in pieces}):
                moves = [
                    (0, num_samples, piece.width, 0, piece.first, piece.place, out.shape[1])
                    for piece in pieces
                    if piece.num_shards == num_shards
                ]
                channel.collect(
                    out, joined_moves(moves), push.home.num_columns, push.forward_dtype, num_shards
                )
        return values, staged

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, values: Tensor, staged: Tensor) -> tuple[Any, ...]:
        push, batch_sizes = ctx.push, ctx.batch_sizes
        rank, dtype, inverse = push.domain.rank, push.backward_dtype, None
        grads, scale = [values, staged], 1.0 / len(batch_sizes)
        if dtype is torch.float16 and push.dtype is torch.float32:
            moved = torch.cat([_columns(values, push.values_pieces), staged], dim=1) * scale
            factor, inverse = float16_scale(moved, push.domain.group)
            # Each product is rounded as on its way through a collective.
            grads, scale = [grad * scale * factor for grad in grads], None
        channel = push.gradients_channel(batch_sizes, ctx.ahead)
        for grad, pieces in zip(grads, (push.values_pieces, push.staged_pieces), strict=True):
            moves = backward_moves(push.layout, batch_sizes, rank, push.sources_of(pieces))
            channel.push(grad, moves, dtype, scale)
        grads_of_others = taken_from(values, ctx.others)
        channel.meet()
        received, num_samples = [], sum(batch_sizes)
        mine, stride = push.layout.blocks[rank], push.widths[rank]
        starts = [0, *itertools.accumulate(block.num_columns for block in mine)]
        for of_group in ctx.blocks:
            width = mine[of_group[0]].num_columns
            out = values.new_empty(num_samples, len(of_group), width)
            row = len(of_group) * width
            moves = [
                (0, num_samples, width, 0, starts[block], place * width, row)
                for place, block in enumerate(of_group)
            ]
            channel.collect(out, joined_moves(moves), stride, dtype)
            received.append(out if inverse is None else out * inverse)
        return values.new_empty(0), *[None] * 5, *received, *grads_of_others


def _columns(matrix: Tensor, pieces: Sequence[_HomePiece]) -> Tensor:
    """Of ``matrix`` the columns to which ``pieces`` go, side by side."""
    parts = [matrix[:, piece.place : piece.place + piece.width] for piece in pieces]
    return torch.cat([matrix[:, :0], *parts], dim=1)
