"""The placements that a table may have, and on which ranks."""

import dataclasses
import functools
from collections.abc import Hashable, Sequence

import numpy as np

from torchembed.sharding.planning.costs import CostModel
from torchembed.sharding.planning.growth import MovedPart, growth_bytes, moved_parts
from torchembed.sharding.planning.loads import Everywhere, Load
from torchembed.sharding.planning.plan import Placement, TablePlan, as_placement, place_table
from torchembed.sharding.planning.storage_costs import PlannedCache
from torchembed.sharding.planning.table_use import TableUse
from torchembed.tables import Storage

MIN_COLUMNS = 4
"""Fewest columns of a column-wise shard, and a divisor of its columns: the width of a vector
load."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableConstraint:
    """Restrictions on the placement of one table; a field that is None restricts nothing."""

    placements: tuple[Placement | str, ...] | None = None
    """Allowed placements, in place of the planner's."""
    num_shards: int | None = None
    """Number of ranks that hold a part of the table."""
    ranks: tuple[int, ...] | None = None
    """Ranks that may hold rows."""
    nodes: tuple[int, ...] | None = None
    """Nodes whose ranks may hold rows; with ``ranks``, a rank has to be in both."""
    exact: TablePlan | None = None
    """Complete placement of the table, which allows no other field."""

    def __post_init__(self) -> None:
        others = (self.placements, self.num_shards, self.ranks, self.nodes)
        if self.exact is not None and any(value is not None for value in others):
            raise ValueError("exact says all of a constraint; leave out its other fields")
        if self.num_shards is not None and self.num_shards < 1:
            raise ValueError(f"num_shards must be positive, got {self.num_shards}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """One way to place a table, and what it costs. Its shards go to one of ``groups``, or to as
    many different ranks of ``pool``."""

    placement: Placement
    groups: tuple[np.ndarray, ...] = ()
    pool: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, dtype=np.int64))
    loads: np.ndarray
    """``[ranks of a group, len(Load)]``, in the order of its ranks; zeros for replicas."""
    holder_seconds: np.ndarray
    """``[ranks of a group]``."""
    everywhere: Everywhere
    table_group: Hashable
    """Key of the tables that a rank looks up and updates in one call; None for replicas."""
    moved: tuple[MovedPart, ...] = ()
    """The rows of each part of a table that grows, where it has some."""
    storage: Storage | None = None
    """The storage of each rank that holds rows; None: its device."""
    exact: TablePlan | None = None

    @property
    def num_parts(self) -> int:
        return len(self.loads)

    @functools.cached_property
    def stacked_groups(self) -> np.ndarray:
        """``groups`` as one array, ``[number of groups, ranks of a group]``."""
        return np.array(self.groups)

    @functools.cached_property
    def most_seconds(self) -> float:
        """The most seconds that a part takes on the rank that holds it."""
        return float(self.holder_seconds.max(initial=0.0))

    @functools.cached_property
    def most_held_bytes(self) -> float:
        """The most bytes that a part takes on the rank that holds it."""
        growth = max((growth_bytes([part]) for part in self.moved), default=0)
        return float(self.loads[:, Load.HELD].max(initial=0.0)) + growth

    def plan(self, table: str, use: TableUse, ranks: Sequence[int]) -> TablePlan:
        """The table over ``ranks``, one for each part."""
        if self.exact is not None:
            return self.exact
        placed = place_table(table, use.spec, self.placement, ranks)
        return dataclasses.replace(placed, storage=self.storage)


def table_options(
    table: str,
    use: TableUse,
    model: CostModel,
    placements: Sequence[Placement],
    constraint: TableConstraint,
    cache: PlannedCache | None = None,
) -> list[Option]:
    """Every way in which ``table`` may be placed.

    Replicas are an option of a pooled table with fewer rows than a rank has samples, and of any
    table whose own constraint names them; of no dynamic table, and of none whose rows are not on
    the device.

    Args:
        cache: rows, of all ranks together, that devices and hosts hold of a table which is to leave
            the devices; None: its rows are where its config says.

    Raises:
        ValueError: if ``constraint`` leaves none, or does not fit the table or the topology, or
            names replicas of a dynamic table.
    """
    topology = model.topology
    num_ranks, per_node = topology.num_ranks, topology.ranks_per_node
    if constraint.exact is not None:
        return [_exact_option(table, use, model, constraint.exact)]
    for name, given, count in (
        ("ranks", constraint.ranks, num_ranks),
        ("nodes", constraint.nodes, topology.num_nodes),
    ):
        if given is not None and not all(0 <= number < count for number in given):
            raise ValueError(
                f"{name} of the constraint of table {table} must be in [0, {count}), got "
                f"{list(given)}"
            )
    pool = tuple(
        rank
        for rank in range(num_ranks)
        if (constraint.ranks is None or rank in constraint.ranks)
        and (constraint.nodes is None or topology.node_of(rank) in constraint.nodes)
    )
    all_ranks = tuple(range(num_ranks))
    nodes = [all_ranks[first : first + per_node] for first in range(0, num_ranks, per_node)]
    nodes = [node for node in nodes if set(node) <= set(pool)]
    named = constraint.placements
    allowed = placements if named is None else [as_placement(table, value) for value in named]

    options: list[Option] = []

    def offer(
        placement: Placement, *, groups: Sequence[tuple[int, ...]] = (), num_parts: int = 0
    ) -> None:
        wished = constraint.num_shards
        ranks = groups[0] if groups else pool[:num_parts]
        if placement in allowed and wished in (None, len(ranks)):
            prototype = place_table(table, use.spec, placement, ranks)
            if cache is not None:
                by_rows = placement in (Placement.ROW_WISE, Placement.TABLE_ROW_WISE)
                num_parts = len(prototype.shards) if by_rows else 1
                storage = cache.storage(num_parts, topology.disk.path)
                prototype = dataclasses.replace(prototype, storage=storage)
            loads, everywhere = _part_loads(use, model, prototype, len(ranks))
            options.append(
                Option(
                    placement=placement,
                    groups=tuple(np.array(group) for group in groups),
                    pool=np.array(() if groups else pool, dtype=np.int64),
                    loads=loads,
                    holder_seconds=model.holder_seconds(loads),
                    everywhere=everywhere,
                    table_group=_table_group(use, prototype),
                    moved=_moved(use, model, prototype),
                    storage=prototype.storage,
                )
            )

    replicas_named = named is not None and Placement.DATA_PARALLEL in allowed
    is_small = use.pooled and use.spec.num_rows < model.batch_size and use.spec.num_ids is not None
    is_small &= use.spec.storage is None
    if len(pool) == num_ranks and (replicas_named or is_small) and cache is None:
        offer(Placement.DATA_PARALLEL, groups=[all_ranks])
    if pool:
        offer(Placement.TABLE_WISE, num_parts=1)
    for num_parts in _column_counts(use.spec.dim, constraint.num_shards):
        if num_parts <= len(pool):
            offer(Placement.COLUMN_WISE, num_parts=num_parts)
    if nodes and (per_node > 1 or named) and (topology.num_nodes > 1 or named):
        offer(Placement.TABLE_ROW_WISE, groups=nodes)
    if len(pool) == num_ranks and (num_ranks > 1 or named):
        offer(Placement.ROW_WISE, groups=[all_ranks])
    if not options:
        raise ValueError(
            f"constraint of table {table} leaves no placement: {constraint} among "
            f"{[placement.value for placement in placements]} on {topology.num_nodes} node(s) of "
            f"{per_node} rank(s). Data-parallel and row-wise take all ranks, and row-wise within a "
            "node a whole node; allow more placements, ranks or shards"
        )
    return options


def _column_counts(dim: int, wished: int | None) -> list[int]:
    """Numbers of column-wise shards: those that divide ``dim`` well, or the one that is wished."""
    if wished is not None:
        divides = wished > 1 and -(-dim // -(-dim // wished)) == wished
        return [wished] if divides else []
    return [n for n in range(2, dim // MIN_COLUMNS + 1) if dim % (n * MIN_COLUMNS) == 0]


def _part_loads(
    use: TableUse, model: CostModel, plan: TablePlan, num_parts: int
) -> tuple[np.ndarray, Everywhere]:
    """Loads of all parts, with zeros for those at the end that hold no rows."""
    loads, everywhere = model.table_loads(use, plan)
    padded = np.zeros((num_parts, len(Load)))
    padded[: len(loads)] = loads
    return padded, everywhere


def _table_group(use: TableUse, plan: TablePlan) -> Hashable:
    if plan.placement is Placement.DATA_PARALLEL:
        return None
    return use.table_group(plan.shards[0].num_columns, plan.storage)


def _moved(use: TableUse, model: CostModel, plan: TablePlan) -> tuple[MovedPart, ...]:
    return tuple(part for shard in plan.shards for part in moved_parts(use, shard, model.rule))


def _exact_option(table: str, use: TableUse, model: CostModel, exact: TablePlan) -> Option:
    num_ranks = model.topology.num_ranks
    ranks = tuple(shard.rank for shard in exact.shards)
    if not all(0 <= rank < num_ranks for rank in ranks) or len(set(ranks)) < len(ranks):
        raise ValueError(
            f"exact ranks of table {table} must be different and in [0, {num_ranks}), got "
            f"{list(ranks)}"
        )
    expected = place_table(table, use.spec, exact.placement, ranks)
    if use.spec.storage is None:
        expected = dataclasses.replace(expected, storage=exact.storage)
    if exact.table != table or exact != expected:
        raise ValueError(
            f"exact of the constraint of table {table} must hold that table as place_table divides "
            f"its {use.spec.num_rows} rows and {use.spec.dim} columns, in the storage that its "
            f"config names, got {exact}"
        )
    loads, everywhere = model.table_loads(use, exact)
    return Option(
        placement=exact.placement,
        groups=(np.array(ranks),),
        loads=loads,
        holder_seconds=model.holder_seconds(loads),
        everywhere=everywhere,
        table_group=_table_group(use, exact),
        moved=_moved(use, model, exact),
        exact=exact,
    )
