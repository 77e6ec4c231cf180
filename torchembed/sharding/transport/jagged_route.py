"""The route of batches whose bags hold any number of ids."""

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.core.host_numbers import HostNumbers
from torchembed.ops.jagged import permute_features
from torchembed.sharding.transport.bucketize_ids import bucketize_ids
from torchembed.sharding.transport.collectives import gather_size
from torchembed.sharding.transport.layout import Layout
from torchembed.sharding.transport.rank_exchange import Lines, Sizes, differentiable_back
from torchembed.sharding.transport.route import Route
from torchembed.sharding.transport.table_ranks import TableRanks


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

    def exchange_sizes(self, *, ahead: bool) -> None:
        """Find out how many ids are sent; on a GPU this waits for this rank's sizes.

        Args:
            ahead: True in the thread that exchanges sizes ahead of the step.
        """
        layout = self._layout
        num_buckets = layout.num_ranks * layout.num_parts
        # By an event of its own, so that the host waits for the sorted ids and not for all that was
        # launched after them.
        of_buckets = HostNumbers(self._bounds(num_buckets).diff())
        sizes = torch.tensor(of_buckets.tolist(), dtype=torch.int64, device="cpu")
        sizes = sizes.view(layout.num_ranks, layout.num_parts)
        self.num_ids_of_parts = sizes.sum(dim=0).tolist()
        head = sizes.new_full((layout.num_ranks, 1), self._num_samples)
        from_ranks, relayed = self._exchange.announce(torch.cat([head, sizes], dim=1), ahead=ahead)
        self.batch_sizes = [num_samples for num_samples, *_ in from_ranks]
        self._sizes = Sizes(
            sizes.sum(dim=1).tolist(),
            _num_ids(from_ranks),
            None if relayed is None else [_num_ids(from_node) for from_node in relayed],
        )
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
        layout, buckets = self._layout, self._buckets
        num_samples, num_ranks = self._num_samples, layout.num_ranks
        if capacity is not None:
            self.batch_sizes = gather_size(num_samples, self._ranks.group)
            self._sizes = self._exchange.to_all([capacity] * num_ranks)
        num_blocks = [len(blocks) for blocks in layout.blocks]
        lengths = buckets.offsets.diff().view(num_ranks * layout.num_parts, num_samples)
        # In one dtype, since all_to_all does not check dtypes: ranks may have offsets of either.
        lengths = lengths[layout.bucket_rows(lengths.device)].flatten().int()
        mine = num_blocks[self._rank]
        of_lengths = self._exchange.scaled(self._exchange.to_all(self.batch_sizes), num_blocks)
        lengths = self._exchange.out(lengths, of_lengths)
        by_rank = [
            part.view(mine, size)
            for part, size in zip(lengths.split(of_lengths.received), self.batch_sizes, strict=True)
        ]
        places = self._places_sent(capacity)
        values = self._exchange.out(buckets.values[places], self._sizes)
        weights = buckets.weights
        if weights is not None:
            weights = self._exchange_weights(weights[places], self._sizes)

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
            return slice(sum(self._sizes.sent))
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
        """The number of vectors that :meth:`send_home` gives."""
        return sum(self._sizes.sent)

    def send_home(self, vectors: Tensor) -> Tensor:
        """Send each id's vector back to the rank of its sample.

        Args:
            vectors: ``[ids that came, D]``, in the order in which they came.

        Returns:
            ``[num_home, D]``. In backward, gradients go to the tables divided by the number of
            ranks.
        """
        num_ranks, width = self._layout.num_ranks, vectors.shape[1]
        lines = Lines(self._sizes, [(width,)] * num_ranks)
        return differentiable_back(
            vectors.reshape(-1), self._exchange, lines, 1.0 / num_ranks, self._ranks.wire
        ).view(-1, width)


def _num_ids(announced: list[list[int]]) -> list[int]:
    """The ids of all parts together, in each row of a number of samples and those of parts."""
    return [sum(of_parts) for _, *of_parts in announced]
