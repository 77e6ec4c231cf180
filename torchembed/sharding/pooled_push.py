"""Pooled vectors by push: into the memory of the ranks whose samples they are, gradients back."""

import collections
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchembed.sharding.channel import Channel, PushDomain
from torchembed.sharding.layout import Layout
from torchembed.sharding.wire import WirePrecision, float16_scale, narrow_dtype

_KNOWN_BATCHES = 64

Move = tuple[int, int, int, int, int, int, int]
"""See :func:`torchembed.triton_kernels.push._push_kernel`."""


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


def forward_moves(layout: Layout, batch_sizes: Sequence[int], rank: int) -> list[Move]:
    """From this rank's ``[all samples, its columns]`` to the ``[samples, all columns]`` of all
    ranks, as :class:`Home` says. Ranks begin with different ones, so not all store into one."""
    home, num_ranks = home_of(layout), layout.num_ranks
    starts = [0, *itertools.accumulate(batch_sizes)]
    moves, column = [], 0
    for block, target in zip(layout.blocks[rank], home.columns[rank], strict=True):
        width = block.num_columns
        for turn in range(num_ranks):
            peer = (rank + 1 + turn) % num_ranks
            size = batch_sizes[peer]
            moves.append((peer, size, width, starts[peer], column, target, home.num_columns))
        column += width
    return moves


def backward_moves(layout: Layout, batch_sizes: Sequence[int], rank: int) -> list[Move]:
    """The way back of every rank's :func:`forward_moves` to this one."""
    home, num_ranks = home_of(layout), layout.num_ranks
    start, size = sum(batch_sizes[:rank]), batch_sizes[rank]
    by_peer: list[list[Move]] = []
    for turn in range(num_ranks):
        peer = (rank + 1 + turn) % num_ranks
        blocks = layout.blocks[peer]
        stride, column, moves = sum(block.num_columns for block in blocks), 0, []
        for block, source in zip(blocks, home.columns[peer], strict=True):
            target = start * stride + column
            moves.append((peer, size, block.num_columns, 0, source, target, stride))
            column += block.num_columns
        by_peer.append(moves)
    return [move for turn in itertools.zip_longest(*by_peer) for move in turn if move is not None]


class _Way(NamedTuple):
    """Of the vectors of batches of some sizes there, and of their gradients back."""

    forward: Any
    """:class:`~torchembed.triton_kernels.push.Moves`."""
    backward: Any


class PooledPush:
    """Pushes the pooled vectors of one layout over the ranks of ``domain``."""

    def __init__(self, layout: Layout, domain: PushDomain, wire: WirePrecision) -> None:
        self._layout, self._domain, self.wire = layout, domain, wire
        self.group = domain.group
        self._home = home_of(layout)
        self._widths = [sum(b.num_columns for b in blocks) for blocks in layout.blocks]
        self._ways: collections.OrderedDict[tuple[int, ...], _Way] = collections.OrderedDict()
        self._captured: list[_Way] = []

    def __call__(self, pooled: Tensor, batch_sizes: Sequence[int]) -> list[list[Tensor]]:
        """For each part the ``[B, columns]`` of this rank's samples from each of its shards, in the
        order of ranks; views of one tensor.

        Where gradients are enabled the result requires one on every rank.

        Args:
            pooled: ``[all samples, columns]``, those of this rank's blocks side by side.
            batch_sizes: samples of each rank.
        """
        if torch.is_grad_enabled() and not pooled.requires_grad:
            pooled = pooled.detach().requires_grad_()
        home = _Push.apply(pooled, self, tuple(batch_sizes))
        columns = iter(home.split([w for of_part in self._home.widths for w in of_part], dim=1))
        return [list(itertools.islice(columns, len(of_part))) for of_part in self._home.widths]

    def way(self, batch_sizes: tuple[int, ...]) -> _Way:
        """What to push for batches of these sizes; known for the last ones, and copied to the GPU
        for others, which waits for it."""
        from torchembed.triton_kernels.push import Moves

        way = self._ways.pop(batch_sizes, None)
        if way is None:
            device, rank = self._domain.device, self._domain.rank
            way = _Way(
                Moves(forward_moves(self._layout, batch_sizes, rank), device),
                Moves(backward_moves(self._layout, batch_sizes, rank), device),
            )
            if len(self._ways) == _KNOWN_BATCHES:
                self._ways.popitem(last=False)
        self._ways[batch_sizes] = way
        if self._domain.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._captured.append(way)
        return way

    def vectors_channel(self, batch_sizes: tuple[int, ...], dtype: torch.dtype) -> Channel:
        """Where vectors of ``dtype`` arrive."""
        num_elements = max(batch_sizes) * self._home.num_columns
        return self._domain.channel((self._layout, "vectors"), num_elements * dtype.itemsize)

    def gradients_channel(self, batch_sizes: tuple[int, ...], dtype: torch.dtype) -> Channel:
        """Where gradients of ``dtype`` arrive."""
        num_elements = sum(batch_sizes) * max(self._widths)
        return self._domain.channel((self._layout, "gradients"), num_elements * dtype.itemsize)

    def home_shape(self, batch_sizes: tuple[int, ...]) -> tuple[int, int]:
        """Of what comes home to this rank."""
        return batch_sizes[self._domain.rank], self._home.num_columns


class _Push(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pooled: Tensor, push: PooledPush, batch_sizes: tuple[int, ...]) -> Tensor:
        ctx.push, ctx.batch_sizes, ctx.shape = push, batch_sizes, pooled.shape
        dtype = narrow_dtype(pooled.dtype, push.wire.forward)
        channel = push.vectors_channel(batch_sizes, dtype)
        channel.push(pooled, push.way(batch_sizes).forward, dtype)
        channel.meet()
        return channel.collect(pooled.new_empty(push.home_shape(batch_sizes)), dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        push, batch_sizes = ctx.push, ctx.batch_sizes
        dtype, inverse = narrow_dtype(grad.dtype, push.wire.backward), None
        scale: float | None = 1.0 / len(batch_sizes)
        if dtype is torch.float16 and grad.dtype is torch.float32:
            grad = grad * scale
            factor, inverse = float16_scale(grad, push.group)
            grad, scale = grad * factor, None
        channel = push.gradients_channel(batch_sizes, dtype)
        channel.push(grad, push.way(batch_sizes).backward, dtype, scale)
        channel.meet()
        received = channel.collect(grad.new_empty(ctx.shape), dtype)
        return received if inverse is None else received * inverse, None, None
