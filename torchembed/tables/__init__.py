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
from torchembed.tables.table_set import TableSet

__all__ = [
    "Constant",
    "GradientReduction",
    "GroupWeight",
    "InPlaceFunction",
    "Initializer",
    "Normal",
    "RecordedGradients",
    "Table",
    "TableGroup",
    "TableOwner",
    "TableSet",
    "TableSpec",
    "Uniform",
    "WeightHolder",
    "group_weight",
    "shifted_row_key",
    "table_of",
]
