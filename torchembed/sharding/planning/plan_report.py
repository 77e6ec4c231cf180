"""The cost of a plan, as tables of text and as data."""

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np

from torchembed.ops.rowwise_update import UpdateRule
from torchembed.sharding.planning.costs import CostModel
from torchembed.sharding.planning.dense_costs import DenseCost, DenseUse, dense_cost
from torchembed.sharding.planning.growth import MovedPart, growth_bytes, moved_parts
from torchembed.sharding.planning.load_seconds import ALL_REDUCE_EXCHANGES
from torchembed.sharding.planning.loads import Everywhere, Load
from torchembed.sharding.planning.plan import Placement, ShardingPlan, TablePlan
from torchembed.sharding.planning.storage_json import storage_text
from torchembed.sharding.planning.table_use import TableUse
from torchembed.sharding.planning.topology import Topology
from torchembed.tables import Storage

MAX_RANK_LINES = 16
"""Number of ranks up to which all are printed; of more only the slowest, fastest and fullest."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableCost:
    """The cost of one table of a plan."""

    table: str
    placement: Placement
    ranks: tuple[int, ...]
    lookups: float
    """Lookups a sample."""
    weight_bytes: int
    """Bytes of rows, their optimizer state and, where the table is dynamic, their ids; of one
    replica if replicated."""
    state_bytes: int
    """Bytes of the optimizer state among them."""
    busiest_bytes: int
    """The most bytes that a rank holds of it on its device."""
    seconds: float
    """Predicted time on the table's busiest rank, with that rank's memory and links to itself."""
    takes_any_id: bool = False
    """True for a dynamic table."""
    storage: Storage | None = None
    """Where the rows of each rank live; None: on its device."""
    hit_rate: float | None = None
    """The share of a step's different rows that caches on the devices are predicted to hold; None
    where all rows are there."""
    host_hit_rate: float | None = None
    """The share of them that the hosts' memory is predicted to hold, with those that the devices
    do; None where no rows are on disk."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankCost:
    """The cost of a step on one rank."""

    rank: int
    weight_bytes: int
    """Bytes of rows on the device, their optimizer state and, where tables are dynamic or cached,
    what finds them."""
    buffer_bytes: int
    """Bytes of activations and exchange buffers."""
    growth_bytes: int = 0
    """The most bytes that dynamic tables take beside those while they grow."""
    host_bytes: int = 0
    """Bytes of rows in the memory of the host, of their optimizer state, and of what finds those on
    disk."""
    disk_bytes: int = 0
    """Bytes of rows on disk, and of their optimizer state."""
    lookup_seconds: float
    update_seconds: float
    ids_seconds: float
    vectors_seconds: float
    gradients_seconds: float
    all_reduce_seconds: float
    fetch_seconds: float = 0.0
    """Seconds for rows that come from the host while others are written back; none of them is
    hidden by what a pipeline does at the same time."""
    disk_seconds: float = 0.0
    """Seconds for rows that come from disk to the host while others go there, likewise."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the rank's memory that rows, optimizer state, growth and buffers take."""
        return self.weight_bytes + self.growth_bytes + self.buffer_bytes

    @property
    def seconds(self) -> float:
        """Sum of all parts, which follow one another."""
        return sum(getattr(self, f"{part}_seconds") for part in TIME_PARTS)


TIME_PARTS = ("lookup", "update", "ids", "vectors", "gradients", "all_reduce", "fetch", "disk")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan and what it costs; ``print`` it. :func:`~torchembed.sharding.draw_plan` draws it."""

    plan: ShardingPlan
    topology: Topology
    batch_size: int
    rule: UpdateRule
    """The update of the tables' optimizer."""
    tables: tuple[TableCost, ...]
    ranks: tuple[RankCost, ...]
    dense: DenseCost | None = None
    """Cost of the dense part, the same on each rank; None where only tables are known."""

    @property
    def seconds(self) -> float:
        """Predicted time of the slowest rank: lookups, updates and exchanges, without the dense
        part."""
        return max(rank.seconds for rank in self.ranks)

    @property
    def balance(self) -> float:
        """Predicted time of the slowest rank over the mean of all ranks; 1 is even."""
        mean = sum(rank.seconds for rank in self.ranks) / len(self.ranks)
        # The mean of equal times may be rounded up.
        return max(self.seconds / mean, 1.0) if mean > 0 else 1.0

    def __str__(self) -> str:
        fullest = max(self.ranks, key=lambda rank: rank.held_bytes)
        topology = self.topology
        setting = (
            f"{len(self.tables)} tables on {topology.num_nodes} node(s) of "
            f"{topology.ranks_per_node} rank(s), {self.batch_size} samples a rank"
        )
        summary = (
            f"predicted: {_ms(self.seconds)} ms on the slowest rank, {self.balance:.3f} times the "
            f"mean; the fullest rank holds {bytes_text(fullest.held_bytes)} of "
            f"{bytes_text(topology.memory_bytes)}"
        )
        lines = [
            setting,
            "",
            *_aligned(_filled([_TABLE_HEAD, *map(_table_row, self.tables)]), num_left=3),
            "",
            *_aligned(_filled([_RANK_HEAD, *map(_rank_row, self._shown())]), num_left=1),
            "",
            *([] if self.dense is None else [_dense_line(self.dense)]),
            summary,
        ]
        return "\n".join(lines)

    def _shown(self) -> list[RankCost]:
        if len(self.ranks) <= MAX_RANK_LINES:
            return list(self.ranks)
        by_time = sorted(self.ranks, key=lambda rank: (-rank.seconds, rank.rank))
        fullest = max(self.ranks, key=lambda rank: rank.held_bytes)
        return list({rank.rank: rank for rank in (by_time[0], by_time[-1], fullest)}.values())


def report_plan(
    plan: ShardingPlan,
    tables: Mapping[str, TableUse],
    model: CostModel,
    dense: DenseUse | None = None,
) -> PlanReport:
    """The report of ``plan``, made by a planner or by hand, under ``model``."""
    topology = model.topology
    loads = np.zeros((topology.num_ranks, len(Load)))
    weights = np.zeros(topology.num_ranks, dtype=np.int64)
    everywhere = Everywhere()
    groups: list[set[Hashable]] = [set() for _ in range(topology.num_ranks)]
    moved: list[list[MovedPart]] = [[] for _ in range(topology.num_ranks)]
    costs = []
    for name, use in tables.items():
        of_table = plan.table(name)
        members = [shard.rank for shard in of_table.shards]
        shard_loads, of_all = model.table_loads(use, of_table)
        everywhere = everywhere.plus(of_all)
        if of_table.placement is not Placement.DATA_PARALLEL:
            for shard in of_table.shards:
                groups[shard.rank].add(use.table_group(shard.num_columns, of_table.storage))
        for shard in of_table.shards:
            moved[shard.rank] += moved_parts(use, shard, model.rule)
        np.add.at(loads, members, shard_loads)
        held = [model.device_bytes(use, shard, of_table.storage) for shard in of_table.shards]
        np.add.at(weights, members, held)
        alone = np.zeros_like(loads)
        np.add.at(alone, members, shard_loads)
        whole = model.weight_bytes(use, use.spec.num_rows, use.spec.dim)
        hit_rate, host_hit_rate = _hit_rates(model, use, of_table)
        costs.append(
            TableCost(
                table=name,
                placement=of_table.placement,
                ranks=tuple(members),
                lookups=model.lookups(use),
                weight_bytes=whole,
                state_bytes=model.rule.state_bytes(use.spec.num_rows, use.spec.dim),
                busiest_bytes=max(held),
                seconds=float(model.rank_seconds(alone, of_all).max()),
                takes_any_id=of_table.takes_any_id,
                storage=of_table.storage,
                hit_rate=hit_rate,
                host_hit_rate=host_hit_rate,
            )
        )
    return PlanReport(
        plan=plan,
        topology=topology,
        batch_size=model.batch_size,
        rule=model.rule,
        tables=tuple(costs),
        ranks=tuple(_rank_costs(model, loads, weights, everywhere, groups, moved)),
        dense=None if dense is None else dense_cost(dense, model),
    )


def _hit_rates(
    model: CostModel, use: TableUse, plan: TablePlan
) -> tuple[float | None, float | None]:
    """The hit rates of the first shard's device and of its host, where those do not hold all rows;
    others hold as many."""
    if plan.storage is None:
        return None, None
    shard = plan.shards[0]
    line_bytes = model.line_bytes(use, shard.num_columns)
    held = use.held_rows(plan.storage, shard.num_rows, line_bytes)
    num_parts = _num_rows(plan) / shard.num_rows
    on_device = model.hit_rate(use, held.on_device * num_parts)
    return on_device, model.hit_rate(use, held.in_host * num_parts) if held.on_disk else None


def _num_rows(plan: TablePlan) -> int:
    """Rows of all shards; under column-wise those of each."""
    return sum({shard.first_row: shard.num_rows for shard in plan.shards}.values())


def _rank_costs(
    model: CostModel,
    loads: np.ndarray,
    weights: np.ndarray,
    everywhere: Everywhere,
    groups: Sequence[set[Hashable]],
    moved: Sequence[Sequence[MovedPart]],
) -> Iterator[RankCost]:
    topology = model.topology
    wires = model.wire_seconds(loads)
    wires += topology.collective_seconds * (wires > 0)
    fetch, disk = model.fetch_seconds(loads), model.disk_seconds(loads)
    reduce = model.all_reduce_seconds(everywhere.all_reduce_bytes)
    reduce += ALL_REDUCE_EXCHANGES * topology.collective_seconds * (reduce > 0)
    for rank, (load, wire) in enumerate(zip(loads, wires, strict=True)):
        calls = len(groups[rank]) + (everywhere.all_reduce_bytes > 0)
        lookup_bytes = load[Load.LOOKUP] + everywhere.lookup_bytes
        update_bytes = load[Load.UPDATE] + everywhere.update_bytes
        held = load[Load.HELD] + everywhere.held_bytes
        yield RankCost(
            rank=rank,
            weight_bytes=int(weights[rank]),
            growth_bytes=growth_bytes(moved[rank]),
            host_bytes=round(load[Load.HOST]),
            disk_bytes=round(load[Load.DISK]),
            buffer_bytes=round(held) - int(weights[rank]),
            lookup_seconds=float(model.lookup_seconds(lookup_bytes, calls)),
            update_seconds=float(model.update_seconds(update_bytes, calls)),
            ids_seconds=float(wire[0]),
            vectors_seconds=float(wire[1]),
            gradients_seconds=float(wire[2]),
            all_reduce_seconds=float(reduce),
            fetch_seconds=float(fetch[rank]),
            disk_seconds=float(disk[rank]),
        )


_TABLE_HEAD = (
    *("table", "placement", "ranks", "storage", "hit rate", "host hit rate"),
    *("bytes", "most on a rank", "lookups", "ms alone"),
)
_RANK_HEAD = (
    *("rank", "rows and state", "growth", "buffers", "host", "disk"),
    *(f"{part} ms" for part in TIME_PARTS),
    "ms",
)
_UNUSED = ""
"""A cell of a column that says something only where some table or rank uses what it is about."""


def _table_row(table: TableCost) -> tuple[str, ...]:
    return (
        table.table,
        table.placement.value + (", any id" if table.takes_any_id else ""),
        ranks_text(table.ranks),
        _UNUSED if table.storage is None else storage_text(table.storage),
        *(
            _UNUSED if rate is None else f"{rate:.1%}"
            for rate in (table.hit_rate, table.host_hit_rate)
        ),
        bytes_text(table.weight_bytes),
        bytes_text(table.busiest_bytes),
        f"{table.lookups:g}",
        _ms(table.seconds),
    )


def _rank_row(rank: RankCost) -> tuple[str, ...]:
    parts = [_ms(getattr(rank, f"{part}_seconds")) for part in TIME_PARTS]
    for part, seconds in (("fetch", rank.fetch_seconds), ("disk", rank.disk_seconds)):
        if seconds == 0:
            parts[TIME_PARTS.index(part)] = _UNUSED
    growth, host, disk = (
        bytes_text(num_bytes) if num_bytes else _UNUSED
        for num_bytes in (rank.growth_bytes, rank.host_bytes, rank.disk_bytes)
    )
    held = (bytes_text(rank.weight_bytes), growth, bytes_text(rank.buffer_bytes), host, disk)
    return (str(rank.rank), *held, *parts, _ms(rank.seconds))


def _filled(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """``rows``, the first of which is the head, without the columns that all others leave
    unused."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    return list(zip(*columns, strict=True))


def _dense_line(dense: DenseCost) -> str:
    parts = {
        "forward": dense.forward_seconds,
        "backward": dense.backward_seconds,
        "mean of gradients": dense.mean_seconds,
        "update": dense.update_seconds,
    }
    return "dense part, ms: " + ", ".join(f"{_ms(value)} {name}" for name, value in parts.items())


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _aligned(rows: Sequence[tuple[str, ...]], *, num_left: int) -> list[str]:
    """Columns of equal width, the first ``num_left`` flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index < num_left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def ranks_text(ranks: Sequence[int]) -> str:
    """``0-3,6`` for 0, 1, 2, 3 and 6."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def bytes_text(num_bytes: float) -> str:
    """``num_bytes`` in words, in the largest binary unit that it reaches."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
