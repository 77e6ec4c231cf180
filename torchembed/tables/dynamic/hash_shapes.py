"""Shapes of the hash tables whose slots are the rows of dynamic tables."""

from collections.abc import Sequence

from torchembed.ops.hash_table import TableShape, growing_shapes, table_shape
from torchembed.tables.dynamic.policies import Dynamic
from torchembed.tables.row_index import IndexedTable, max_rows_of


def shape_with(dynamic: Dynamic, num_rows: int, max_rows: int) -> TableShape | None:
    """The shape of a table, or of a rank's part of one, while it has ``num_rows`` of the
    ``max_rows`` that it has once it has grown; None where it never has as many."""
    num_shared = dynamic.num_hashed_rows
    own, max_own = num_rows - num_shared, max_rows - num_shared
    if own < 1:
        return None
    grows = dynamic.initial_capacity is not None
    shapes = growing_shapes(max_own) if grows else [table_shape(own)]
    of_rows = (shape for shape in shapes if shape.num_rows == own)
    return next((shape._replace(num_spare=num_shared) for shape in of_rows), None)


def shapes_of(tables: Sequence[IndexedTable], dynamic: Dynamic) -> list[TableShape]:
    """The shape of each table, which follows from its rows."""
    shapes = [shape_with(dynamic, table.num_rows, max_rows_of(table)) for table in tables]
    assert None not in shapes, tables
    return [shape for shape in shapes if shape is not None]


def capacities_of(
    tables: Sequence[IndexedTable], shapes: Sequence[TableShape]
) -> list[tuple[int, int]]:
    """The ids that each table can hold now, and once it has grown."""
    return [
        (shape.capacity, max_rows_of(table) - shape.num_spare)
        for table, shape in zip(tables, shapes, strict=True)
    ]
