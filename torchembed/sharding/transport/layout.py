"""The assignment of a sharded module's slots to ranks: blocks of bags for each rank."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.core.piece_order import PieceOrder
from torchembed.sharding.planning.partition import Partition, RangePartition
from torchembed.sharding.planning.plan import Shard, TablePlan


@dataclasses.dataclass(frozen=True)
class SlotPart:
    """Some columns of a slot's table, whose rows ``shards`` divide: what one id is looked up in."""

    slot: int
    shards: tuple[Shard, ...]
    partition: Partition
    """The partition of ids over the ranks of the shards."""

    @property
    def num_columns(self) -> int:
        return self.shards[0].num_columns


def slot_parts(slot: int, plan: TablePlan) -> list[SlotPart]:
    """The parts of ``slot``'s table, from the first columns to the last."""
    by_column: dict[int, list[Shard]] = {}
    for shard in plan.shards:
        by_column.setdefault(shard.first_column, []).append(shard)
    return [
        SlotPart(slot, tuple(shards), RangePartition.of(shards))
        for _, shards in sorted(by_column.items())
    ]


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
        self.partitions = [part.partition for part in parts]
        """The partition of each part's ids."""
        self._ranges = [partition.boundaries(num_ranks) for partition in self.partitions]
        self.are_ranges = None not in self._ranges
        """True if each rank holds a range of each part's ids."""
        self.divides_rows = any(len(part.shards) > 1 for part in parts)
        """True if several ranks hold rows of one part."""
        self.reorder = PieceOrder()
        self._known: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    def boundaries(self, device: torch.device) -> Tensor:
        """int64 ``[P, W + 1]``, where :attr:`are_ranges`: rank w holds ids
        ``[out[p, w], out[p, w + 1])`` of part p.

        Copied to ``device`` once, and not to be changed.
        """
        assert self.are_ranges
        return self._on(device)[0]

    def places(self, device: torch.device) -> Tensor:
        """int64 ``[P, W + 1]``: how many ranks before w share part p.

        Copied to ``device`` once, and not to be changed.
        """
        return self._on(device)[2]

    def bucket_rows(self, device: torch.device) -> Tensor:
        """int64: for each block of all ranks, its row ``w * P + part`` in a bucketized batch.

        Copied to ``device`` once, and not to be changed.
        """
        return self._on(device)[1]

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        if device not in self._known:
            # Kept, since a copy from pageable memory makes the host wait for the GPU. Not made as
            # inference tensors, which a later training step could not use.
            with torch.inference_mode(mode=False):
                self._known[device] = (
                    self._made_boundaries().to(device),
                    self._made_bucket_rows().to(device),
                    self._made_places().to(device),
                )
        return self._known[device]

    def _made_boundaries(self) -> Tensor:
        ranges = [[0] * (self.num_ranks + 1) if of is None else of for of in self._ranges]
        return torch.tensor(ranges, dtype=torch.int64).reshape(-1, self.num_ranks + 1)

    def _made_places(self) -> Tensor:
        holds = torch.zeros(self.num_parts, self.num_ranks + 1, dtype=torch.int64)
        for rank, blocks in enumerate(self.blocks):
            for block in blocks:
                holds[block.part, rank + 1] = 1
        return holds.cumsum(1)

    def _made_bucket_rows(self) -> Tensor:
        rows = [w * self.num_parts + b.part for w, blocks in enumerate(self.blocks) for b in blocks]
        return torch.tensor(rows, dtype=torch.int64)

    def make_local(self, ids: Sequence[Tensor], rank: int) -> Tensor | None:
        """Replace the ids that came to ``rank`` by what its row indices are asked for, in place.

        Args:
            ids: of each of the rank's blocks, those of all ranks' rows.

        Returns:
            bool ``[L]``, for all of them: True where the rank holds the row. None where partitions
            are ranges, since ids of other ranks are outside the rank's rows then.
        """
        of_blocks = [self.partitions[block.part] for block in self.blocks[rank]]
        pairs, is_valid = list(zip(of_blocks, ids, strict=True)), None
        # Before the ids are changed: the partition knows only global ones.
        if not self.are_ranges and pairs:
            is_valid = torch.cat([p.rank_of(of_block) == rank for p, of_block in pairs])
        for partition, of_block in pairs:
            partition.make_local(of_block, rank)
        return is_valid
