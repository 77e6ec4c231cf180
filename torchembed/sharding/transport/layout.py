"""Where the slots of a sharded module go: blocks of bags for each rank."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.core.piece_order import PieceOrder
from torchembed.sharding.planning.plan import Shard, TablePlan


@dataclasses.dataclass(frozen=True)
class SlotPart:
    """Some columns of a slot's table, whose rows ``shards`` divide: what one id is looked up in."""

    slot: int
    shards: tuple[Shard, ...]

    @property
    def num_columns(self) -> int:
        return self.shards[0].num_columns


def slot_parts(slot: int, plan: TablePlan) -> list[SlotPart]:
    """The parts of ``slot``'s table, from the first columns to the last."""
    by_column: dict[int, list[Shard]] = {}
    for shard in plan.shards:
        by_column.setdefault(shard.first_column, []).append(shard)
    return [SlotPart(slot, tuple(shards)) for _, shards in sorted(by_column.items())]


@dataclasses.dataclass(frozen=True)
class Block:
    """The bags of one part that go to one shard of its rows."""

    part: int
    first_row: int
    num_rows: int
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
                block = Block(number, shard.first_row, shard.num_rows, shard.num_columns)
                self.blocks[shard.rank].append(block)
        self.reorder = PieceOrder()
        self._known: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def boundaries(self, device: torch.device) -> Tensor:
        """int64 ``[P, W + 1]``: rank w holds rows ``[out[p, w], out[p, w + 1])`` for part p.

        Copied to ``device`` once, and not to be changed.
        """
        return self._on(device)[0]

    def bucket_rows(self, device: torch.device) -> Tensor:
        """int64: for each block of all ranks, its row ``w * P + part`` in a bucketized batch.

        Copied to ``device`` once, and not to be changed.
        """
        return self._on(device)[1]

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._known:
            # A copy to a GPU waits for it.
            with torch.inference_mode(mode=False):
                self._known[device] = (
                    self._made_boundaries().to(device),
                    self._made_bucket_rows().to(device),
                )
        return self._known[device]

    def _made_boundaries(self) -> Tensor:
        ends = [[0] * (self.num_ranks + 1) for _ in range(self.num_parts)]
        for rank, blocks in enumerate(self.blocks):
            for block in blocks:
                ends[block.part][rank + 1] = block.first_row + block.num_rows
        table = torch.tensor(ends, dtype=torch.int64).reshape(-1, self.num_ranks + 1)
        return table.cummax(dim=1).values

    def _made_bucket_rows(self) -> Tensor:
        rows = [w * self.num_parts + b.part for w, blocks in enumerate(self.blocks) for b in blocks]
        return torch.tensor(rows, dtype=torch.int64)
