"""Routes: what takes the ids of a batch to the ranks that hold their rows, and the vectors back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.core.copies.columns import ColumnCopy
from torchembed.core.features import SparseFeatures
from torchembed.sharding.transport.layout import Layout
from torchembed.sharding.transport.pooled_push import GroupVectors, PooledPush
from torchembed.sharding.transport.rank_exchange import (
    Lines,
    Sizes,
    differentiable_back,
    differentiable_out,
)
from torchembed.sharding.transport.table_ranks import TableRanks
from torchembed.sharding.wire import WirePrecision


class Route:
    """The exchange of one batch's ids with the ranks that hold their rows, and of vectors back. The
    batch has a feature for each part of the layout.

    Attributes:
        features: the ids that this rank looks up: one feature for each of its blocks, with the
            samples of all ranks, rank by rank. Ids outside the block's rows count for nothing.
        is_valid: bool ``[L]``, False for ids of rows on other ranks, but for those that are outside
            the block's rows; None where none else come here.
        batch_sizes: samples of each rank.
    """

    features: SparseFeatures
    is_valid: Tensor | None = None
    batch_sizes: list[int]

    def __init__(self, layout: Layout, ranks: TableRanks) -> None:
        self._layout, self._ranks = layout, ranks
        self._exchange, self._rank = ranks.exchange, ranks.rank

    def _block_keys(self) -> tuple[str, ...]:
        return tuple(str(number) for number in range(len(self._layout.blocks[self._rank])))

    def _exchange_weights(self, weights: Tensor | None, sizes: Sizes) -> Tensor | None:
        """Send per-id weights to the ranks of their ids; their gradients come back to this rank.

        Pooled gradients are divided by the number of ranks on their way to the tables; the
        gradients of weights, which stay local, are multiplied again.
        """
        if weights is None:
            return None
        num_ranks = self._layout.num_ranks
        if not weights.requires_grad:
            return self._exchange.out(weights, sizes)
        lines = Lines(sizes, [(1,)] * num_ranks)
        as_they_are = WirePrecision()
        return differentiable_out(weights, self._exchange, lines, float(num_ranks), as_they_are)

    def return_pooled(self, pooled: Tensor) -> list[Tensor]:
        """Send the samples' vectors back to the samples' ranks.

        Args:
            pooled: ``[all samples, columns]``, those of this rank's blocks in order.

        Returns:
            For each part the ``[B, columns]`` of this rank's samples, summed over its shards in the
            order of ranks. In backward, gradients go to the tables divided by the number of ranks:
            the mean over ranks.
        """
        num_samples = self.batch_sizes[self._rank]
        widths = [tuple(block.num_columns for block in blocks) for blocks in self._layout.blocks]
        weights = self.features.weights
        if not self._layout.blocks[self._rank] and weights is not None and weights.requires_grad:
            # Without a block nothing here uses the weights. Autograd would leave out the backward
            # of their exchange, which needs all ranks.
            pooled = pooled + weights.sum().to(pooled.dtype) * 0
        num_ranks = self._layout.num_ranks
        lines = Lines(self._exchange.to_all(self.batch_sizes), widths)
        scale = 1.0 / num_ranks
        flat = differentiable_back(
            pooled.reshape(-1), self._exchange, lines, scale, self._ranks.wire
        )
        from_shards: list[list[Tensor]] = [[] for _ in range(self._layout.num_parts)]
        for blocks, of_rank, vectors in zip(
            self._layout.blocks,
            widths,
            flat.split([num_samples * sum(of_rank) for of_rank in widths]),
            strict=True,
        ):
            by_block = vectors.view(num_samples, sum(of_rank)).split(of_rank, dim=1)
            for block, columns in zip(blocks, by_block, strict=True):
                from_shards[block.part].append(columns)
        return [_sum_over_shards(columns) for columns in from_shards]

    def push_pooled(
        self,
        groups: Sequence[GroupVectors],
        push: PooledPush,
        others: Sequence[tuple[Tensor, Sequence[ColumnCopy]]],
        *,
        ahead: bool,
    ) -> tuple[Tensor, list[tuple[int, Tensor]]]:
        """:meth:`return_pooled` by push.

        Args:
            groups: the vectors of all of this rank's blocks.
            push: of this layout.
            others, ahead: as ``push`` takes them.

        Returns:
            The values ``[B, columns]``, with the parts that have a place in them, and of each other
            part its number and its ``[B, columns]``.
        """
        weights, anchor = self.features.weights, None
        if not groups and weights is not None and weights.requires_grad:
            # Nothing here uses the weights. As the anchor they keep the backward of their exchange,
            # which needs all ranks, in the graph.
            anchor = weights.flatten()[:0]
        values, staged = push(groups, self.batch_sizes, anchor, others, ahead=ahead)
        return values, [(part, _sum_over_shards(columns)) for part, columns in staged]


def _sum_over_shards(columns: list[Tensor]) -> Tensor:
    """The sum of a part's columns over its shards, ``[B, D]``, in the order of ranks, so that every
    transport gives the same bits."""
    return columns[0] if len(columns) == 1 else torch.stack(columns).sum(0)
