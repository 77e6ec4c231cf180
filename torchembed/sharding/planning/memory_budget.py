"""The memory that sharding a model takes on a rank, known before any of it is allocated."""

import dataclasses
from collections.abc import Mapping

from torchembed.ops.rowwise_update import UpdateRule
from torchembed.sharding.planning.costs import TableUse
from torchembed.sharding.planning.growth import growth_bytes, moved_parts
from torchembed.sharding.planning.plan import ShardingPlan
from torchembed.sharding.planning.plan_report import PlanReport, bytes_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """Bytes that one rank will hold and that its device has free; ``print`` it."""

    rank: int
    row_bytes: int
    """Bytes of the tables' rows."""
    state_bytes: int | None
    """Bytes of the tables' optimizer state; None where the optimizer is not known."""
    index_bytes: int = 0
    """Bytes of the ids of dynamic tables, and of what is kept of their use."""
    growth_bytes: int = 0
    """The most bytes that dynamic tables take beside those, while they grow and their rows move;
    without their optimizer state where the optimizer is not known."""
    buffer_bytes: int | None
    """Activations and exchange buffers of the tables; None where no batch size is known."""
    dense_bytes: int
    """Gradients, optimizer state and, by push, exchange buffers of all other parameters, whose
    values are there already."""
    free_bytes: int

    @property
    def needed_bytes(self) -> int:
        """Sum of all known parts."""
        known = (self.row_bytes, self.index_bytes, self.growth_bytes, self.dense_bytes)
        return sum(known) + (self.state_bytes or 0) + (self.buffer_bytes or 0)

    def check(self) -> None:
        """Raise ``ValueError`` where the needed bytes exceed the free ones."""
        if self.needed_bytes > self.free_bytes:
            raise ValueError(
                f"tables do not fit: {self}. Use more ranks, a plan that divides the largest "
                "tables, a 16-bit dtype for them, or an optimizer with less state"
            )

    def __str__(self) -> str:
        parts = {
            "of rows": self.row_bytes,
            "of their optimizer state": self.state_bytes,
            "of dynamic tables' ids": self.index_bytes or None,
            "for rows of dynamic tables that move as they grow": self.growth_bytes or None,
            "of exchange buffers": self.buffer_bytes,
            "for the dense part's gradients and state": self.dense_bytes,
        }
        known = ", ".join(f"{bytes_text(p)} {what}" for what, p in parts.items() if p is not None)
        unknown = {"their optimizer state": self.state_bytes, "exchange buffers": self.buffer_bytes}
        unknown = [what for what, part in unknown.items() if part is None]
        not_counted = f", {' and '.join(unknown)} not counted" if unknown else ""
        needed, free = bytes_text(self.needed_bytes), bytes_text(self.free_bytes)
        return f"rank {self.rank} will take {needed} of {free} free memory: {known}{not_counted}"


def memory_budget(
    plan: ShardingPlan,
    tables: Mapping[str, TableUse],
    rank: int,
    *,
    report: PlanReport | None,
    rule: UpdateRule | None = None,
    dense_bytes: int,
    free_bytes: int,
) -> MemoryBudget:
    """The budget of ``rank`` under ``plan``.

    Args:
        report: from a planner, which knows the optimizer and the batches.
        rule: the optimizer's, where it is known without a planner.
    """
    row_bytes, index_bytes, state_bytes = 0, 0, None
    mine = [(table.table, s) for table in plan.tables for s in table.shards if s.rank == rank]
    for table, shard in mine:
        spec = tables[table].spec
        row_bytes += shard.num_rows * shard.num_columns * spec.dtype.itemsize
        index_bytes += spec.index.bytes_for(shard.num_rows)
    if report is not None:
        state_bytes = report.ranks[rank].weight_bytes - row_bytes - index_bytes
    elif rule is not None:
        state_bytes = sum(rule.state_bytes(shard.num_rows, shard.num_columns) for _, shard in mine)
    moved = [part for table, shard in mine for part in moved_parts(tables[table], shard, rule)]
    return MemoryBudget(
        rank=rank,
        row_bytes=row_bytes,
        state_bytes=state_bytes,
        index_bytes=index_bytes,
        growth_bytes=growth_bytes(moved) if report is None else report.ranks[rank].growth_bytes,
        buffer_bytes=None if report is None else report.ranks[rank].buffer_bytes,
        dense_bytes=dense_bytes,
        free_bytes=free_bytes,
    )
