"""Where rows and their optimizer state live."""

from torchembed.tables.group import (
    GradientReduction,
    RecordedGradients,
    Table,
    TableGroup,
    TableSpec,
    table_of,
)
from torchembed.tables.group_weight import group_weight
from torchembed.tables.initializers import (
    Constant,
    Initializer,
    InPlaceFunction,
    Normal,
    Uniform,
    shifted_row_key,
)
from torchembed.tables.table_set import TableSet

__all__ = [
    "Constant",
    "GradientReduction",
    "InPlaceFunction",
    "Initializer",
    "Normal",
    "RecordedGradients",
    "Table",
    "TableGroup",
    "TableSet",
    "TableSpec",
    "Uniform",
    "group_weight",
    "shifted_row_key",
    "table_of",
]
