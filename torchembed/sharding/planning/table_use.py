"""A table as plans see it."""

import dataclasses
from collections.abc import Hashable

import torch

from torchembed.tables import TableSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableUse:
    """A whole table and how a model uses it."""

    spec: TableSpec
    features: tuple[str, ...]
    """Features that are looked up in the table."""
    pooled: bool = True
    """False where each id gets a vector of its own."""
    output_dtype: torch.dtype = torch.float32
    module: str = ""
    """Name of the module that the table belongs to; tables of one module may grow at once."""
    must_be_on_device: bool = False
    """True for a table that has no rows in host memory but by its own config."""

    def table_group(self, num_columns: int) -> Hashable:
        """Key that is equal for the shards which a rank looks up and updates in one call."""
        return num_columns, self.spec.dtype, self.pooled, self.spec.index
