"""Sharding plans: which rank holds which rows of which table. A plan is data."""

import dataclasses
import enum
import json
from collections.abc import Mapping, Sequence

from torchembed.sharding.planning.storage_json import (
    storage_entries,
    storage_from,
    storage_text,
)
from torchembed.tables import Storage, TableSpec


class Placement(enum.Enum):
    """The distribution of a table's rows over the ranks."""

    DATA_PARALLEL = "data_parallel"
    """Every rank holds all rows; gradients are reduced."""
    TABLE_WISE = "table_wise"
    """One rank holds all rows."""
    COLUMN_WISE = "column_wise"
    """The k-th of some ranks holds columns ``[k * n, (k + 1) * n)`` of all rows, with
    ``n = ceil(dim / ranks)``. Each of them gets every id."""
    ROW_WISE = "row_wise"
    """Rank w holds rows ``[w * n, (w + 1) * n)`` with ``n = ceil(rows / ranks)``. Of a dynamic
    table each rank holds one of capacity n, with the ids that a hash gives to it."""
    TABLE_ROW_WISE = "table_row_wise"
    """The rows are split, as under ``ROW_WISE``, over the ranks of one node. Each rank's part of a
    pooled sum is sent by itself, as under ``ROW_WISE``."""

    @property
    def is_divided(self) -> bool:
        """True where a rank holds a part of the table's rows or columns."""
        return self not in (Placement.DATA_PARALLEL, Placement.TABLE_WISE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """Rows ``[first_row, first_row + num_rows)`` of a table on one rank, and of these the columns
    ``[first_column, first_column + num_columns)``. Rows of a dynamic table's shards are numbered
    one shard after the other."""

    rank: int
    first_row: int
    num_rows: int
    first_column: int
    num_columns: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TablePlan:
    """The placement of one table: the rows and columns that each rank holds."""

    table: str
    placement: Placement
    shards: tuple[Shard, ...]
    """The shards in the order of ranks; without those that would be empty."""
    takes_any_id: bool = False
    """True for a dynamic table: the rows of a shard belong to whatever ids it holds, and a hash of
    an id says which of the ranks that divide the rows holds it."""
    storage: Storage | None = None
    """Where the rows of a shard live, with sizes of each rank's caches; None: on its device."""

    def __post_init__(self) -> None:
        if self.storage is not None and self.placement is Placement.DATA_PARALLEL:
            raise ValueError(
                f"placement of table {self.table} must not be data_parallel, since its rows live "
                "outside the device, where every rank would hold them; use table_wise, column_wise "
                "or row_wise"
            )


def _count(entries: Mapping[str, object], name: str) -> int:
    number = entries[name]
    if not isinstance(number, int):
        raise TypeError(f"{name} must be an integer, got {number!r}")
    return number


def _flag(entries: Mapping[str, object], name: str) -> bool:
    flag = entries.get(name, False)
    if not isinstance(flag, bool):
        raise TypeError(f"{name} must be true or false, got {flag!r}")
    return flag


def _shard(entries: Mapping[str, object]) -> Shard:
    return Shard(**{field.name: _count(entries, field.name) for field in dataclasses.fields(Shard)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """The placement of a model's tables; ``print`` shows it, ``to_json`` keeps it."""

    num_ranks: int
    tables: tuple[TablePlan, ...]
    """Table names are the parameters' names in the model, without ``.weight``."""
    num_nodes: int = 1
    """Node k consists of ranks ``[k * n, (k + 1) * n)`` with ``n = num_ranks / num_nodes``."""

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.num_ranks % self.num_nodes:
            raise ValueError(
                f"num_nodes must divide the {self.num_ranks} ranks, got {self.num_nodes}"
            )
        names = [plan.table for plan in self.tables]
        if len(set(names)) != len(names):
            raise ValueError(f"tables must have different names, got {names}")
        for plan in self.tables:
            ranks = [shard.rank for shard in plan.shards]
            if ranks != sorted(set(ranks)):
                raise ValueError(
                    f"ranks of table {plan.table} must be different and increase, got {ranks}"
                )
            if any(not 0 <= rank < self.num_ranks for rank in ranks):
                raise ValueError(
                    f"ranks of table {plan.table} must be in [0, {self.num_ranks}), got {ranks}"
                )
            nodes = {rank // self.ranks_per_node for rank in ranks}
            if plan.placement is Placement.TABLE_ROW_WISE and len(nodes) > 1:
                raise ValueError(
                    f"ranks of table {plan.table} must be of one node of {self.ranks_per_node} "
                    f"ranks, got {ranks}"
                )

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on each node."""
        return self.num_ranks // self.num_nodes

    def table(self, name: str) -> TablePlan:
        """The plan of table ``name``."""
        for plan in self.tables:
            if plan.table == name:
                return plan
        known = ", ".join(plan.table for plan in self.tables)
        raise ValueError(f"plan has no table {name}; it has {known}")

    def to_json(self) -> str:
        """The plan as JSON; :meth:`from_json` gives an equal one back."""
        data = {
            "num_ranks": self.num_ranks,
            "num_nodes": self.num_nodes,
            "tables": [
                {
                    "table": plan.table,
                    "placement": plan.placement.value,
                    "shards": [dataclasses.asdict(shard) for shard in plan.shards],
                    "takes_any_id": plan.takes_any_id,
                    "storage": storage_entries(plan.storage),
                }
                for plan in self.tables
            ],
        }
        return json.dumps(data, indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "ShardingPlan":
        """The plan that :meth:`to_json` wrote.

        Raises:
            ValueError: if ``text`` is none; says what is wrong in it.
        """
        try:
            data = json.loads(text)
            tables = tuple(
                TablePlan(
                    table=str(table["table"]),
                    placement=Placement(table["placement"]),
                    shards=tuple(_shard(shard) for shard in table["shards"]),
                    takes_any_id=_flag(table, "takes_any_id"),
                    storage=storage_from(table.get("storage")),
                )
                for table in data["tables"]
            )
            num_ranks, num_nodes = _count(data, "num_ranks"), _count(data, "num_nodes")
        except (KeyError, TypeError, ValueError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(
                f"text must be a plan as ShardingPlan.to_json() writes it, but {what}"
            ) from error
        return cls(num_ranks=num_ranks, tables=tables, num_nodes=num_nodes)

    def __str__(self) -> str:
        rows = [("table", "placement", "ranks", "rows a rank", "ids", "storage")]
        for plan in self.tables:
            ranks = ",".join(str(shard.rank) for shard in plan.shards)
            most = max((shard.num_rows for shard in plan.shards), default=0)
            ids = "any" if plan.takes_any_id else ""
            stored = storage_text(plan.storage)
            rows.append((plan.table, plan.placement.value, ranks, f"{most:,}", ids, stored))
        if not any(plan.storage for plan in self.tables):
            rows = [row[:-1] for row in rows]
        if not any(plan.takes_any_id for plan in self.tables):
            rows = [(*row[:4], *row[5:]) for row in rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)


def place_table(
    name: str, spec: TableSpec, placement: Placement, ranks: Sequence[int]
) -> TablePlan:
    """The plan of one table over ``ranks``, which share its rows or columns in increasing order.

    Args:
        ranks: one under ``TABLE_WISE``, those of one node under ``TABLE_ROW_WISE``, any under
            ``COLUMN_WISE``, else all. None of them twice.

    Raises:
        ValueError: for no ranks, for one that is named twice, for more than one under
            ``TABLE_WISE``, under ``DATA_PARALLEL`` for a dynamic table or one with a storage, or
            for one with a storage that grows.
    """
    ranks = sorted(ranks)
    if not ranks or len(set(ranks)) < len(ranks):
        raise ValueError(
            f"ranks of table {name} must be one or more different ones, got {ranks}; name each "
            "rank that holds a part of it, once"
        )
    if placement is Placement.TABLE_WISE and len(ranks) > 1:
        raise ValueError(
            f"ranks of table {name} must be one under table_wise, got {ranks}; give one of them, "
            "or divide the table by row_wise or column_wise"
        )
    if spec.storage is not None and spec.index.grows:
        raise ValueError(
            f"storage of table {name} must be None for a dynamic table with an initial_capacity, "
            f"whose rows are on the device since they grow, got {spec.storage}"
        )
    takes_any_id = spec.num_ids is None
    if takes_any_id and placement is Placement.DATA_PARALLEL:
        raise ValueError(
            f"placement of dynamic table {name} must not be data_parallel, since each rank would "
            "insert the ids of its own batches; use table_wise, column_wise or row_wise"
        )
    all_rows, all_columns = (0, spec.num_rows), (0, spec.dim)
    if placement in (Placement.DATA_PARALLEL, Placement.TABLE_WISE):
        parts = [(all_rows, all_columns)] * len(ranks)
    elif placement is Placement.COLUMN_WISE:
        parts = [(all_rows, columns) for columns in _divided(spec.dim, len(ranks))]
    elif takes_any_id:
        num_rows = spec.index.rows_of_part(spec.num_rows, len(ranks))
        parts = [((place * num_rows, num_rows), all_columns) for place in range(len(ranks))]
    else:
        parts = [(rows, all_columns) for rows in _divided(spec.num_rows, len(ranks))]
    shards = tuple(
        Shard(
            rank=rank,
            first_row=first_row,
            num_rows=num_rows,
            first_column=first_column,
            num_columns=num_columns,
        )
        for rank, ((first_row, num_rows), (first_column, num_columns)) in zip(
            ranks, parts, strict=True
        )
        if num_rows > 0 and num_columns > 0
    )
    return TablePlan(
        table=name,
        placement=placement,
        shards=shards,
        takes_any_id=takes_any_id,
        storage=spec.storage,
    )


def _divided(size: int, num_parts: int) -> list[tuple[int, int]]:
    """First item and number of items of each part: ``ceil(size / num_parts)``, the last less."""
    most = -(-size // num_parts)
    starts = [min(part * most, size) for part in range(num_parts)]
    return [(start, min(most, size - start)) for start in starts]


def make_plan(
    specs: Mapping[str, TableSpec],
    num_ranks: int,
    placements: Mapping[str, Placement | str] | None = None,
    *,
    num_nodes: int = 1,
) -> ShardingPlan:
    """A plan for the tables ``specs`` (by name), with the wished ``placements`` of some or all.

    The others are table-wise, the largest first, each on the rank that then holds the fewest bytes;
    a table larger than one rank's share of all bytes is row-wise.

    Raises:
        ValueError: for a placement of a table that is not there, or a placement unknown.
    """
    wished = {name: as_placement(name, value) for name, value in (placements or {}).items()}
    unknown = sorted(set(wished) - set(specs))
    if unknown:
        raise ValueError(
            f"plan places tables {unknown}, which the model lacks; it has {list(specs)}"
        )

    def num_bytes(spec: TableSpec) -> int:
        return spec.num_rows * spec.dim * spec.dtype.itemsize

    share = sum(map(num_bytes, specs.values())) / num_ranks
    held = [0] * num_ranks
    plans: dict[str, TablePlan] = {}
    for name, spec in sorted(specs.items(), key=lambda item: -num_bytes(item[1])):
        too_large = num_ranks > 1 and num_bytes(spec) > share
        default = Placement.ROW_WISE if too_large else Placement.TABLE_WISE
        placement = wished.get(name, default)
        ranks = list(range(num_ranks))
        if placement is Placement.TABLE_WISE:
            ranks = [held.index(min(held))]
        elif placement is Placement.TABLE_ROW_WISE:
            per_node = num_ranks // num_nodes
            nodes = [ranks[first : first + per_node] for first in range(0, num_ranks, per_node)]
            ranks = min(nodes, key=lambda node: sum(held[rank] for rank in node))
        plan = place_table(name, spec, placement, ranks)
        for shard in plan.shards:
            held[shard.rank] += shard.num_rows * shard.num_columns * spec.dtype.itemsize
        plans[name] = plan
    tables = tuple(plans[name] for name in specs)
    return ShardingPlan(num_ranks=num_ranks, tables=tables, num_nodes=num_nodes)


def as_placement(table: str, value: object) -> Placement:
    """``value`` as a :class:`Placement`; strings are its values."""
    try:
        return Placement(value)
    except ValueError:
        known = ", ".join(repr(placement.value) for placement in Placement)
        raise ValueError(
            f"placement of table {table} must be one of {known}, got {value!r}"
        ) from None
