"""The assignment of a sharded module's slots to ranks: blocks of bags for each rank."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.piece_order import PieceOrder
from torchembed.ops.id_shares import are_in_share
from torchembed.sharding.planning.partition import HashPartition, Partition, RangePartition
from torchembed.sharding.planning.plan import Shard, TablePlan


@dataclasses.dataclass(frozen=True)
class SlotPart:
    """Some columns of a slot's table, whose rows ``shards`` divide: what one id is looked up in."""

    slot: int
    shards: tuple[Shard, ...]
    partition: Partition
    """The division of the ids among the ranks of the shards."""

    @property
    def num_columns(self) -> int:
        return self.shards[0].num_columns


def slot_parts(slot: int, plan: TablePlan) -> list[SlotPart]:
    """The parts of ``slot``'s table, from the first columns to the last."""
    by_column: dict[int, list[Shard]] = {}
    for shard in plan.shards:
        by_column.setdefault(shard.first_column, []).append(shard)
    return [
        SlotPart(slot, tuple(shards), _partition(plan, shards))
        for _, shards in sorted(by_column.items())
    ]


def _partition(plan: TablePlan, shards: Sequence[Shard]) -> Partition:
    if plan.takes_any_id:
        return HashPartition(ranks=tuple(shard.rank for shard in shards))
    return RangePartition.of(shards)


@dataclasses.dataclass(frozen=True)
class Block:
    """The bags of one part that go to one shard of its rows."""

    part: int
    num_columns: int


class Layout:
    """Blocks of every rank, in the order of parts, for ``P`` parts of slots over ``W`` ranks.

    Every rank works out the same layout from the plan, so none of it is ever exchanged.
    """

    def __init__(self, parts: Sequence[SlotPart], num_ranks: int) -> None:
        self.num_parts = len(parts)
        self.num_ranks = num_ranks
        self.blocks: list[list[Block]] = [[] for _ in range(num_ranks)]
        """The blocks of each rank."""
        for number, part in enumerate(parts):
            for shard in part.shards:
                self.blocks[shard.rank].append(Block(number, shard.num_columns))
        self._partitions = [part.partition for part in parts]
        self.are_ranges = all(isinstance(p, RangePartition) for p in self._partitions)
        """True if each rank holds a range of each part's ids."""
        self.divides_rows = any(len(part.shards) > 1 for part in parts)
        """True if several ranks hold rows of one part."""
        self.reorder = PieceOrder()
        self._known: dict[torch.device, _LayoutTensors] = {}

    def boundaries(self, device: torch.device) -> Tensor:
        """int64 ``[P, W + 1]``: rank w holds ids ``[out[p, w], out[p, w + 1])`` of part p. Where a
        hash chooses the rank, as if each rank that shares the part held one id, its place among
        them.

        Copied to ``device`` once, and not to be changed.
        """
        return self._on(device).boundaries

    def hashed_parts(self, device: torch.device) -> dict[HashPartition, Tensor]:
        """For each partition by a hash bool ``[P + 1]``: which parts have it; False at last.

        Copied to ``device`` once, and not to be changed.
        """
        return self._on(device).hashed_parts

    def bucket_rows(self, device: torch.device) -> Tensor:
        """int64: for each block of all ranks, its row ``w * P + part`` in a bucketized batch.

        Copied to ``device`` once, and not to be changed.
        """
        return self._on(device).bucket_rows

    def _on(self, device: torch.device) -> "_LayoutTensors":
        if device not in self._known:
            # Kept, since a copy from pageable memory makes the host wait for the GPU. Not made as
            # inference tensors, which a later training step could not use.
            with torch.inference_mode(mode=False):
                self._known[device] = _LayoutTensors(
                    self._made_boundaries().to(device),
                    self._made_bucket_rows().to(device),
                    {p: is_of.to(device) for p, is_of in self._made_hashed_parts().items()},
                    self._made_shares().to(device),
                )
        return self._known[device]

    def _made_boundaries(self) -> Tensor:
        ranks = range(self.num_ranks)
        bounds = [
            partition.boundaries(self.num_ranks)
            if isinstance(partition, RangePartition)
            else list(itertools.accumulate((w in partition.ranks for w in ranks), initial=0))
            for partition in self._partitions
        ]
        return torch.tensor(bounds, dtype=torch.int64).reshape(-1, self.num_ranks + 1)

    def _made_hashed_parts(self) -> dict[HashPartition, Tensor]:
        hashed = dict.fromkeys(p for p in self._partitions if isinstance(p, HashPartition))
        # Behind the last part there is one more, of positions that no bag holds.
        return {p: torch.tensor([*(p == q for q in self._partitions), False]) for p in hashed}

    def _made_bucket_rows(self) -> Tensor:
        rows = [w * self.num_parts + b.part for w, blocks in enumerate(self.blocks) for b in blocks]
        return torch.tensor(rows, dtype=torch.int64)

    def _made_shares(self) -> Tensor:
        """int64 ``[2, blocks]``: for each block of all ranks, the number of shares that a hash
        divides its ids into, and the share of its rank; ids in ranges are one share."""
        shares = []
        for rank, blocks in enumerate(self.blocks):
            for block in blocks:
                partition = self._partitions[block.part]
                is_hash = isinstance(partition, HashPartition)
                ranks = partition.ranks if is_hash else (rank,)
                shares.append((len(ranks), ranks.index(rank)))
        return torch.tensor(shares, dtype=torch.int64).reshape(-1, 2).t().contiguous()

    def make_local(
        self, ids: Tensor, hotness: Sequence[int], num_samples: int, rank: int
    ) -> Tensor | None:
        """Replace the ids that came to ``rank`` by what its row indices are asked for, in place.

        Args:
            ids: ``[L]``: of each of the rank's blocks, those of all ranks' rows.
            hotness: ids of a sample, for each of these blocks.
            num_samples: of all ranks together.

        Returns:
            bool ``[L]``: False where the rank holds no row of an id, but for ids in ranges, since
            those of other ranks are outside the rank's rows then. None where all partitions are
            ranges.
        """
        mine = self.blocks[rank]
        partitions = [self._partitions[block.part] for block in mine]
        of_blocks = ids.split([count * num_samples for count in hotness])
        for partition, of_block in zip(partitions, of_blocks, strict=True):
            if isinstance(partition, RangePartition):
                partition.make_local(of_block, rank)
        if all(isinstance(partition, RangePartition) for partition in partitions):
            return None
        first = sum(map(len, self.blocks[:rank]))
        num_shares, shares = self._on(ids.device).shares[:, first : first + len(mine)]
        return are_in_share(ids, num_shares, shares, hotness=hotness, batch_size=num_samples)


class _LayoutTensors(NamedTuple):
    """The tensors that a layout keeps on a device."""

    boundaries: Tensor
    bucket_rows: Tensor
    hashed_parts: dict[HashPartition, Tensor]
    shares: Tensor
