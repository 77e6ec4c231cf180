"""Where the slots of a sharded module go: blocks of bags for each rank."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.sharding.plan import TablePlan


@dataclasses.dataclass(frozen=True)
class Block:
    """The bags of one slot that go to one shard of the slot's table."""

    slot: int
    first_row: int
    num_rows: int


class Layout:
    """Blocks of every rank, in the order of slots, for ``S`` slots over ``W`` ranks.

    Every rank works out the same layout from the plan, so none of it is ever exchanged.
    """

    def __init__(self, slot_plans: Sequence[TablePlan], num_ranks: int) -> None:
        self.num_slots = len(slot_plans)
        self.num_ranks = num_ranks
        self.blocks: list[list[Block]] = [[] for _ in range(num_ranks)]
        """The blocks of each rank."""
        for slot, plan in enumerate(slot_plans):
            for shard in plan.shards:
                self.blocks[shard.rank].append(Block(slot, shard.first_row, shard.num_rows))

    def boundaries(self, device: torch.device) -> Tensor:
        """int64 ``[S, W + 1]``: rank w holds rows ``[out[s, w], out[s, w + 1])`` for slot s."""
        ends = [[0] * (self.num_ranks + 1) for _ in range(self.num_slots)]
        for rank, blocks in enumerate(self.blocks):
            for block in blocks:
                ends[block.slot][rank + 1] = block.first_row + block.num_rows
        table = torch.tensor(ends, dtype=torch.int64, device=device).reshape(-1, self.num_ranks + 1)
        return table.cummax(dim=1).values

    def bucket_rows(self, device: torch.device) -> Tensor:
        """int64: for each block of all ranks, its row ``w * S + slot`` in a bucketized batch."""
        rows = [w * self.num_slots + b.slot for w, blocks in enumerate(self.blocks) for b in blocks]
        return torch.tensor(rows, dtype=torch.int64, device=device)
