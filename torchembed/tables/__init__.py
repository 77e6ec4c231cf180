"""Where rows and their optimizer state live."""

from torchembed.tables.group import (
    GradientReduction,
    RecordedGradients,
    Table,
    TableGroup,
    TableOwner,
    TableSpec,
    WeightHolder,
    table_of,
)
from torchembed.tables.group_weight import GroupWeight, group_weight
from torchembed.tables.initializers import (
    Constant,
    Initializer,
    InPlaceFunction,
    Normal,
    Uniform,
    shifted_row_key,
)
from torchembed.tables.row_stream import RowChunk, read_rows, row_chunks, row_ranges, write_rows
from torchembed.tables.table_set import TableSet

__all__ = [
    "Constant",
    "GradientReduction",
    "GroupWeight",
    "InPlaceFunction",
    "Initializer",
    "Normal",
    "RecordedGradients",
    "RowChunk",
    "Table",
    "TableGroup",
    "TableOwner",
    "TableSet",
    "TableSpec",
    "Uniform",
    "WeightHolder",
    "group_weight",
    "read_rows",
    "row_chunks",
    "row_ranges",
    "shifted_row_key",
    "table_of",
    "write_rows",
]
