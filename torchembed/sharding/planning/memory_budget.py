"""The memory that sharding a model takes on a rank, known before any of it is allocated."""

import dataclasses
import socket
from collections.abc import Mapping, Sequence

from torchembed.ops.rowwise_update import UpdateRule
from torchembed.sharding.planning.growth import growth_bytes, moved_parts
from torchembed.sharding.planning.plan import ShardingPlan
from torchembed.sharding.planning.plan_report import PlanReport, bytes_text, ranks_text
from torchembed.sharding.planning.storage_costs import host_line_bytes
from torchembed.sharding.planning.table_use import TableUse


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """Bytes that one rank will hold and that its device has free; ``print`` it."""

    rank: int
    row_bytes: int
    """Bytes of the tables' rows on the device."""
    state_bytes: int | None
    """Bytes of their optimizer state; None where the optimizer is not known."""
    index_bytes: int = 0
    """Bytes of the ids of dynamic tables, and of what is kept of their use; and of what finds the
    rows of tables that are cached on the device."""
    growth_bytes: int = 0
    """The most bytes that dynamic tables take beside those, while they grow and their rows move;
    without their optimizer state where the optimizer is not known."""
    buffer_bytes: int | None
    """Activations and exchange buffers of the tables; None where no batch size is known."""
    dense_bytes: int
    """Gradients, optimizer state and, by push, exchange buffers of all other parameters, whose
    values are there already."""
    free_bytes: int
    host_bytes: int = 0
    """Bytes of rows in the memory of the host, of their optimizer state where it is known, and of
    what finds rows on disk."""
    disk_bytes: int = 0
    """Bytes of rows on disk, and of their optimizer state where it is known, once all of them were
    trained."""
    host: str = dataclasses.field(default_factory=socket.gethostname)
    """Name of the rank's host."""
    host_free_bytes: int | None = None
    """Free memory of the host, of which all of its ranks take; None where nobody asked."""
    is_on_host: bool = False
    """True where the device has the memory of the host."""

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

    @property
    def needed_host_bytes(self) -> int:
        """Bytes that the rank takes of the memory of its host."""
        return self.host_bytes + (self.needed_bytes if self.is_on_host else 0)

    def __str__(self) -> str:
        parts = {
            "of rows": self.row_bytes,
            "of their optimizer state": self.state_bytes,
            "of what finds rows": self.index_bytes or None,
            "for rows of dynamic tables that move as they grow": self.growth_bytes or None,
            "of exchange buffers": self.buffer_bytes,
            "for the dense part's gradients and state": self.dense_bytes,
        }
        known = ", ".join(f"{bytes_text(p)} {what}" for what, p in parts.items() if p is not None)
        unknown = {"their optimizer state": self.state_bytes, "exchange buffers": self.buffer_bytes}
        unknown = [what for what, part in unknown.items() if part is None]
        not_counted = f", {' and '.join(unknown)} not counted" if unknown else ""
        needed, free = bytes_text(self.needed_bytes), bytes_text(self.free_bytes)
        elsewhere = "".join(
            f"; and {bytes_text(num_bytes)} {where}"
            for num_bytes, where in (
                (self.host_bytes, "of its host"),
                (self.disk_bytes, "of its disk at most"),
            )
            if num_bytes
        )
        return (
            f"rank {self.rank} will take {needed} of {free} free memory: "
            f"{known}{not_counted}{elsewhere}"
        )


def check_hosts(budgets: Sequence[MemoryBudget]) -> None:
    """Raise ``ValueError`` where the ranks of a host need more memory than it has free, together,
    for rows that are not on devices.

    Args:
        budgets: of all ranks.
    """
    hosts: dict[str, list[MemoryBudget]] = {}
    for budget in budgets:
        hosts.setdefault(budget.host, []).append(budget)
    for of_host in hosts.values():
        free = [budget.host_free_bytes for budget in of_host if budget.host_free_bytes is not None]
        needed = sum(budget.needed_host_bytes for budget in of_host)
        if any(budget.host_bytes for budget in of_host) and free and needed > min(free):
            ranks = ranks_text([budget.rank for budget in of_host])
            raise ValueError(
                f"tables do not fit: ranks {ranks} will take {bytes_text(needed)} of the "
                f"{bytes_text(min(free))} free memory of their host. Use more nodes, a 16-bit "
                "dtype for the tables, or an optimizer with less state"
            )


def memory_budget(
    plan: ShardingPlan,
    tables: Mapping[str, TableUse],
    rank: int,
    *,
    report: PlanReport | None,
    rule: UpdateRule | None = None,
    dense_bytes: int,
    free_bytes: int,
    host_free_bytes: int | None = None,
    is_on_host: bool = False,
) -> MemoryBudget:
    """The budget of ``rank`` under ``plan``.

    Args:
        report: from a planner, which knows the optimizer and the batches.
        rule: the optimizer's, where it is known without a planner.
        host_free_bytes, is_on_host: as :class:`MemoryBudget` has them.
    """
    row_bytes, index_bytes, host_bytes, disk_bytes, states = 0, 0, 0, 0, 0
    rule = rule if report is None else report.rule
    mine = [(table, s) for table in plan.tables for s in table.shards if s.rank == rank]
    for table, shard in mine:
        use = tables[table.table]
        of_row = shard.num_columns * use.spec.dtype.itemsize
        of_state = 0 if rule is None else rule.state_bytes(1, shard.num_columns)
        line_bytes = of_row + of_state
        held = use.held_rows(table.storage, shard.num_rows, line_bytes)
        row_bytes += held.on_device * of_row
        states += held.on_device * of_state
        in_host = held.in_host * host_line_bytes(table.storage, of_row, of_state)
        host_bytes += in_host + held.host_index_bytes
        disk_bytes += held.on_disk * line_bytes
        index_bytes += held.index_bytes + use.index_bytes(shard.num_rows)
    state_bytes = None if rule is None else states
    moved = [
        part for table, shard in mine for part in moved_parts(tables[table.table], shard, rule)
    ]
    return MemoryBudget(
        rank=rank,
        row_bytes=row_bytes,
        state_bytes=state_bytes,
        index_bytes=index_bytes,
        growth_bytes=growth_bytes(moved) if report is None else report.ranks[rank].growth_bytes,
        buffer_bytes=None if report is None else report.ranks[rank].buffer_bytes,
        dense_bytes=dense_bytes,
        free_bytes=free_bytes,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        host_free_bytes=host_free_bytes,
        is_on_host=is_on_host,
    )
