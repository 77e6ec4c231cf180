"""Routes: the ids of a batch to the ranks that hold their rows, and the vectors back."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.core.host_numbers import HostNumbers
from torchembed.core.piece_order import in_order
from torchembed.ops.jagged import permute_features
from torchembed.sharding.transport.bucketize_ids import bucketize_ids
from torchembed.sharding.transport.collectives import (
    differentiable_exchange,
    exchange,
    exchange_sizes,
    gather_size,
)
from torchembed.sharding.transport.columns import ColumnCopy
from torchembed.sharding.transport.layout import Layout
from torchembed.sharding.transport.pooled_push import GroupVectors, PooledPush
from torchembed.sharding.transport.table_ranks import TableRanks
from torchembed.sharding.wire import WirePrecision


class Route:
    """The exchange of one batch's ids with the ranks that hold their rows, and of vectors back. The
    batch has a feature for each part of the layout.

    Attributes:
        features: the ids that this rank looks up: one feature for each of its blocks, with the
            samples of all ranks, rank by rank. Ids outside the block's rows count for nothing.
        is_valid: bool ``[L]``, False for ids of rows on other ranks; None where they do not come
            here, or are outside the block's rows.
        batch_sizes: samples of each rank.
    """

    features: SparseFeatures
    is_valid: Tensor | None = None
    batch_sizes: list[int]

    def __init__(self, layout: Layout, ranks: TableRanks) -> None:
        self._layout, self._ranks = layout, ranks
        self._group, self._rank = ranks.group, ranks.rank

    def _block_keys(self) -> tuple[str, ...]:
        return tuple(str(number) for number in range(len(self._layout.blocks[self._rank])))

    def _exchange_weights(
        self, weights: Tensor | None, send: list[int], receive: list[int]
    ) -> Tensor | None:
        """Send per-id weights to the ranks of their ids; their gradients come back to this rank.

        Pooled gradients are divided by the number of ranks on their way to the tables; the
        gradients of weights, which stay local, are multiplied again.
        """
        if weights is None:
            return None
        num_ranks = self._layout.num_ranks
        if not weights.requires_grad:
            return exchange(weights, send, receive, self._group)
        as_they_are = WirePrecision()
        return differentiable_exchange(
            weights, send, receive, self._group, float(num_ranks), as_they_are
        )

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
        widths = [[block.num_columns for block in blocks] for blocks in self._layout.blocks]
        weights = self.features.weights
        if not self._layout.blocks[self._rank] and weights is not None and weights.requires_grad:
            # Without a block nothing here uses the weights. Autograd would leave out the backward
            # of their exchange, which needs all ranks.
            pooled = pooled + weights.sum().to(pooled.dtype) * 0
        send = [size * pooled.shape[1] for size in self.batch_sizes]
        receive = [num_samples * sum(of_rank) for of_rank in widths]
        scale = 1.0 / self._layout.num_ranks
        flat = differentiable_exchange(
            pooled.reshape(-1), send, receive, self._group, scale, self._ranks.wire
        )
        from_shards: list[list[Tensor]] = [[] for _ in range(self._layout.num_parts)]
        for blocks, of_rank, vectors in zip(
            self._layout.blocks, widths, flat.split(receive), strict=True
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
        group, rank = ranks.group, ranks.rank
        assert features.hotness is not None
        num_samples = features.batch_size
        hotness = [features.hotness[number] for number in of_parts]
        known = gather_size(num_samples, group) if batch_sizes is None else batch_sizes
        self.batch_sizes = list(known)
        mine = layout.blocks[rank]
        counts = [count * num_samples for count in hotness]
        send = [sum(counts[block.part] for block in blocks) for blocks in layout.blocks]
        ids_a_sample = sum(hotness[block.part] for block in mine)
        receive = [ids_a_sample * size for size in self.batch_sizes]
        of_blocks = [of_parts[block.part] for blocks in layout.blocks for block in blocks]
        sizes = [count * num_samples for count in features.hotness]
        pieces = [hotness[block.part] * size for size in self.batch_sizes for block in mine]
        by_block = [n for k in range(len(mine)) for n in range(len(pieces))[k :: len(mine)]]

        # What arrives is ordered by sender first; a lookup takes all samples of a feature, one
        # after the other.
        def blocks_first(received: Tensor) -> Tensor:
            """From (rank, block) order to (block, rank) order."""
            return layout.reorder(received, pieces, by_block)

        def pick(tensor: Tensor) -> Tensor:
            return layout.reorder(tensor, sizes, of_blocks)

        self._send, self._receive = send, receive
        self.hotness, self.num_samples = hotness, num_samples
        values = blocks_first(exchange(pick(features.values), send, receive, group))
        lengths = [hotness[block.part] * sum(self.batch_sizes) for block in mine]
        self.is_valid = layout.make_local(values.split(lengths), rank)
        weights = features.weights
        if weights is not None:
            exchanged = self._exchange_weights(pick(weights), send, receive)
            assert exchanged is not None
            weights = blocks_first(exchanged)
        self.features = SparseFeatures(
            keys=self._block_keys(),
            values=values,
            batch_size=sum(self.batch_sizes),
            hotness=tuple(hotness[block.part] for block in mine),
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
        scale = 1.0 / num_ranks
        # Pieces are moved by torch.cat, whose gradient is one, too.
        home = differentiable_exchange(
            in_order(vectors, pieces, by_rank),
            *(self._receive, self._send, self._group, scale, self._ranks.wire),
        )
        parts = [block.part for blocks in layout.blocks for block in blocks]
        sizes = [self.hotness[part] * self.num_samples for part in parts]
        return in_order(home, sizes, [parts.index(part) for part in range(layout.num_parts)])


class JaggedRoute(Route):
    """A route for bags of any length. Each id goes to exactly the rank that holds its row.

    Made in three parts, each by every rank in the same order: the constructor sorts this rank's ids
    by the rank that holds their rows; :meth:`exchange_sizes` tells the others how many will come;
    :meth:`exchange_ids` sends them, and only then the route can be used. The first two may run in
    another thread than the third, while the device does other work.

    Without :meth:`exchange_sizes`, :meth:`exchange_ids` takes a capacity that all sizes follow
    from. Spare positions are sent too then, and no bag holds them.

    Attributes:
        num_ids_of_parts: of each part, this rank's; once sizes were exchanged.
        num_ids_of_blocks: of each of this rank's blocks, all ranks'; None where the host does not
            know.
    """

    num_ids_of_parts: list[int]
    num_ids_of_blocks: list[int] | None = None
    _capacity: int | None = None

    def __init__(self, features: SparseFeatures, layout: Layout, ranks: TableRanks) -> None:
        super().__init__(layout, ranks)
        assert features.offsets is not None
        self._num_samples = features.batch_size
        self._buckets = bucketize_ids(features, layout)

    def _bounds(self, num_pieces: int) -> Tensor:
        """The bounds, in the sorted ids, of ``num_pieces`` segments of as many bags each."""
        offsets = self._buckets.offsets
        num_bags = (offsets.shape[0] - 1) // max(num_pieces, 1)
        return offsets[torch.arange(num_pieces + 1, device=offsets.device) * num_bags]

    def needed_capacity(self) -> Tensor:
        """The most ids that this rank sends to one, ``[]``."""
        return self._bounds(self._layout.num_ranks).diff().amax()

    def exchange_sizes(self, group: dist.ProcessGroup | None) -> None:
        """Find out how many ids are sent; on a GPU this waits for this rank's sizes.

        Args:
            group: of the same ranks, through the CPU; of one thread's collectives.
        """
        layout = self._layout
        num_buckets = layout.num_ranks * layout.num_parts
        # By an event of its own, so that the host waits for the sorted ids and not for all that was
        # launched after them.
        of_buckets = HostNumbers(self._bounds(num_buckets).diff())
        sizes = torch.tensor(of_buckets.tolist(), dtype=torch.int64, device="cpu")
        sizes = sizes.view(layout.num_ranks, layout.num_parts)
        self.num_ids_of_parts = sizes.sum(dim=0).tolist()
        self._send = sizes.sum(dim=1).tolist()
        head = sizes.new_full((layout.num_ranks, 1), self._num_samples)
        from_ranks = exchange_sizes(torch.cat([head, sizes], dim=1), group)
        self.batch_sizes = [num_samples for num_samples, *_ in from_ranks]
        self._receive = [sum(of_parts) for _, *of_parts in from_ranks]
        blocks = layout.blocks[self._rank]
        self.num_ids_of_blocks = [sum(row[1 + b.part] for row in from_ranks) for b in blocks]

    def exchange_ids(self, capacity: int | None = None) -> None:
        """Send the ids to where their rows are; never waits for a GPU.

        Args:
            capacity: the number of ids that each rank sends to each, where sizes were not
                exchanged; the same on all ranks. Where :meth:`needed_capacity` says more on any,
                the route is of no use.
        """
        self._capacity = capacity
        layout, group, buckets = self._layout, self._group, self._buckets
        num_samples, num_ranks = self._num_samples, layout.num_ranks
        if capacity is not None:
            self.batch_sizes = gather_size(num_samples, group)
            self._send = self._receive = [capacity] * num_ranks
        num_blocks = [len(blocks) for blocks in layout.blocks]
        lengths = buckets.offsets.diff().view(num_ranks * layout.num_parts, num_samples)
        # In one dtype, since all_to_all does not check dtypes: ranks may have offsets of either.
        lengths = lengths[layout.bucket_rows(lengths.device)].flatten().int()
        mine = num_blocks[self._rank]
        received_sizes = [mine * size for size in self.batch_sizes]
        sent_sizes = [count * num_samples for count in num_blocks]
        lengths = exchange(lengths, sent_sizes, received_sizes, group)
        by_rank = [
            part.view(mine, size)
            for part, size in zip(lengths.split(received_sizes), self.batch_sizes, strict=True)
        ]
        places = self._places_sent(capacity)
        values = exchange(buckets.values[places], self._send, self._receive, group)
        weights = buckets.weights
        if weights is not None:
            weights = self._exchange_weights(weights[places], self._send, self._receive)

        # Ids arrive in (rank, block) order and are looked up in (block, rank) order. Padding comes
        # last of each rank and is left out of the order.
        piece_lengths = torch.stack([part.sum(dim=1) for part in by_rank])
        if capacity is not None:
            spare = capacity - piece_lengths.sum(dim=1, keepdim=True)
            piece_lengths = torch.cat([piece_lengths, spare.clamp_min(0)], dim=1)
        of_rank = piece_lengths.shape[1]
        self._piece_offsets = self._offsets_of(piece_lengths, values, capacity)
        self._pieces = [r * of_rank + k for k in range(mine) for r in range(num_ranks)]
        in_order = permute_features(
            values,
            self._piece_offsets,
            self._pieces,
            num_features=num_ranks * of_rank,
            batch_size=1,
            num_ids=values.shape[0],
            weights=weights,
        )
        offsets = self._offsets_of(torch.cat(by_rank, dim=1), values, capacity)
        self.features = SparseFeatures(
            keys=self._block_keys(),
            values=in_order.values,
            batch_size=sum(self.batch_sizes),
            offsets=offsets,
            weights=in_order.weights,
        )

    def _offsets_of(self, lengths: Tensor, values: Tensor, capacity: int | None) -> Tensor:
        """Offsets of ``lengths`` among ``values``, in bounds also where the capacity was too
        small."""
        offsets = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0))
        return offsets if capacity is None else offsets.clamp_max(values.shape[0])

    def _places_sent(self, capacity: int | None) -> slice | Tensor:
        """The positions in the sorted ids of what is sent to each rank; spare ones may be any."""
        if capacity is None:
            return slice(sum(self._send))
        starts = self._bounds(self._layout.num_ranks)[:-1]
        places = starts.unsqueeze(1) + torch.arange(capacity, device=starts.device)
        return places.clamp_max(self._buckets.values.shape[0] - 1).flatten()

    def received_order(self) -> Tensor:
        """For each position of :attr:`features` its position among the ids as they came, int64
        ``[L]``; -1 for a spare one."""
        positions = torch.arange(self.features.values.shape[0], device=self._piece_offsets.device)
        order = permute_features(
            positions,
            self._piece_offsets,
            self._pieces,
            num_features=self._piece_offsets.shape[0] - 1,
            batch_size=1,
            num_ids=positions.shape[0],
        )
        return order.values.where(positions < order.offsets[-1], -1)

    def home_places(self) -> Tensor:
        """For each id of the routed batch the place of its vector among those that
        :meth:`send_home` gives, int64 ``[L]``; -1 where it was not sent."""
        # Vectors come home in bucketized order, and positions say where each id was before.
        positions = self._buckets.positions.long()
        bounds = self._bounds(self._layout.num_ranks)
        if self._capacity is None:
            return positions.where(positions < bounds[-1], -1)
        ranks = torch.searchsorted(bounds[1:], positions, right=True)
        is_sent = ranks < self._layout.num_ranks
        ranks = ranks.where(is_sent, 0)
        of_rank = positions - bounds[ranks]
        is_sent &= of_rank < self._capacity
        return (ranks * self._capacity + of_rank).where(is_sent, -1)

    @property
    def num_home(self) -> int:
        """How many vectors :meth:`send_home` gives."""
        return sum(self._send)

    def send_home(self, vectors: Tensor) -> Tensor:
        """Send each id's vector back to the rank of its sample.

        Args:
            vectors: ``[ids that came, D]``, in the order in which they came.

        Returns:
            ``[num_home, D]``. In backward, gradients go to the tables divided by the number of
            ranks.
        """
        scale = 1.0 / self._layout.num_ranks
        wire = self._ranks.wire
        return differentiable_exchange(vectors, self._receive, self._send, self._group, scale, wire)
