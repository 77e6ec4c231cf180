"""The route of batches whose bags of a feature hold the same number of ids."""

from collections.abc import Sequence

from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.core.piece_order import in_order
from torchembed.sharding.transport.collectives import gather_size
from torchembed.sharding.transport.layout import Layout
from torchembed.sharding.transport.rank_exchange import Lines, differentiable_back
from torchembed.sharding.transport.route import Route
from torchembed.sharding.transport.table_ranks import TableRanks


class FixedRoute(Route):
    """Fixed hotness: every size follows from the batch sizes, so no GPU is waited for.

    A row-wise table's ids go to all ranks, each of which leaves out those of other ranks' rows.

    Attributes:
        hotness: of each part.
        num_samples: of this rank.

    Args:
        features: of which each part is one.
        of_parts: the number of each part's feature.
        batch_sizes: samples of each rank; asked for where None. The hotness is the same on all.
    """

    def __init__(
        self,
        features: SparseFeatures,
        of_parts: Sequence[int],
        layout: Layout,
        ranks: TableRanks,
        batch_sizes: Sequence[int] | None = None,
    ) -> None:
        super().__init__(layout, ranks)
        rank = ranks.rank
        assert features.hotness is not None
        num_samples = features.batch_size
        hotness = [features.hotness[number] for number in of_parts]
        known = gather_size(num_samples, ranks.group) if batch_sizes is None else batch_sizes
        self.batch_sizes = list(known)
        mine = layout.blocks[rank]
        ids_a_sample = [sum(hotness[b.part] for b in blocks) for blocks in layout.blocks]
        samples = self._exchange.to_all(self.batch_sizes)
        self._sizes = self._exchange.scaled(samples, ids_a_sample)
        of_blocks = [of_parts[block.part] for blocks in layout.blocks for block in blocks]
        sizes = [count * num_samples for count in features.hotness]
        pieces = [hotness[block.part] * size for size in self.batch_sizes for block in mine]
        by_block = [n for k in range(len(mine)) for n in range(len(pieces))[k :: len(mine)]]

        # What arrives is ordered by sender first; a lookup takes all samples of a feature, one
        # after the other.
        def blocks_first(received: Tensor) -> Tensor:
            """Bring vectors from (rank, block) order to (block, rank) order."""
            return layout.reorder(received, pieces, by_block)

        def pick(tensor: Tensor) -> Tensor:
            return layout.reorder(tensor, sizes, of_blocks)

        self.hotness, self.num_samples = hotness, num_samples
        values = blocks_first(self._exchange.out(pick(features.values), self._sizes))
        of_all_ranks = sum(self.batch_sizes)
        of_mine = tuple(hotness[block.part] for block in mine)
        self.is_valid = layout.make_local(values, of_mine, of_all_ranks, rank)
        weights = features.weights
        if weights is not None:
            exchanged = self._exchange_weights(pick(weights), self._sizes)
            assert exchanged is not None
            weights = blocks_first(exchanged)
        self.features = SparseFeatures(
            keys=self._block_keys(),
            values=values,
            batch_size=of_all_ranks,
            hotness=of_mine,
            weights=weights,
        )

    def return_sequences(self, vectors: Tensor) -> Tensor:
        """Send each id's vector back to the rank of its sample, where no part's rows are divided.

        Args:
            vectors: ``[ids of this rank's features, D]``, in their order.

        Returns:
            ``[L, D]``: a vector for each id of the parts' features, in their order. In backward,
            gradients go to the tables divided by the number of ranks.
        """
        layout = self._layout
        mine, num_ranks = layout.blocks[self._rank], layout.num_ranks
        pieces = [self.hotness[b.part] * size for b in mine for size in self.batch_sizes]
        by_rank = [k * num_ranks + r for r in range(num_ranks) for k in range(len(mine))]
        scale, width = 1.0 / num_ranks, vectors.shape[1]
        lines = Lines(self._sizes, [(width,)] * num_ranks)
        # Pieces are moved by torch.cat, whose gradient is one, too.
        home = differentiable_back(
            in_order(vectors, pieces, by_rank).reshape(-1),
            *(self._exchange, lines, scale, self._ranks.wire),
        ).view(-1, width)
        parts = [block.part for blocks in layout.blocks for block in blocks]
        sizes = [self.hotness[part] * self.num_samples for part in parts]
        return in_order(home, sizes, [parts.index(part) for part in range(layout.num_parts)])
