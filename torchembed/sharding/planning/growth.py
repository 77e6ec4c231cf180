"""The memory of dynamic tables while they grow, when their rows are there twice."""

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from torchembed.ops.rowwise_update import UpdateRule
from torchembed.sharding.planning.plan import Shard
from torchembed.sharding.planning.table_use import ROUNDED_ID_BYTES, TableUse


class MovedPart(NamedTuple):
    """The rows of a table on one rank, which move when tables of their group grow."""

    module: str
    """Tables of one module may grow before the same batch; modules grow one after the other."""
    table_group: Hashable
    """Tables of a module with equal ones are moved together."""
    num_rows: int
    """Rows once the table has grown."""
    added_rows: int
    """Rows that its last growth adds; 0 where it never grows."""
    row_bytes: int
    """Bytes of a row, its optimizer state, and what an index keeps and notes of it to move it."""


def moved_parts(use: TableUse, shard: Shard, rule: UpdateRule | None) -> list[MovedPart]:
    """The rows of ``shard`` if they may have to move: one part or none.

    Args:
        rule: the optimizer's; None where it is not known, so that no state is counted.
    """
    spec = use.spec
    if not spec.index.grows:
        return []
    state_bytes = 0 if rule is None else rule.state_bytes(1, shard.num_columns)
    row_bytes = shard.num_columns * spec.dtype.itemsize + state_bytes + spec.index.moved_row_bytes
    if use.is_rounded:
        row_bytes += ROUNDED_ID_BYTES
    added_rows = spec.index.added_rows(shard.num_rows, spec.num_rows)
    table_group = use.table_group(shard.num_columns)
    return [MovedPart(use.module, table_group, shard.num_rows, added_rows, row_bytes)]


def growth_bytes(parts: Iterable[MovedPart]) -> int:
    """The most memory that growth takes on a rank which holds ``parts``, beside that of the tables
    at their capacity.

    A group needs the most when the table that adds the fewest rows at last grows after all others:
    then all rows but those are there twice. All groups of a module may do so at once.
    """
    groups: dict[tuple[str, Hashable], list[MovedPart]] = {}
    for part in parts:
        groups.setdefault((part.module, part.table_group), []).append(part)
    of_modules: dict[str, int] = {}
    for (module, _), members in groups.items():
        added = [part.added_rows for part in members if part.added_rows]
        if added:
            num_rows = sum(part.num_rows for part in members) - min(added)
            of_group = num_rows * members[0].row_bytes
            of_modules[module] = of_modules.get(module, 0) + of_group
    return max(of_modules.values(), default=0)
