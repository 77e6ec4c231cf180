"""A table as plans see it."""

import dataclasses
from collections.abc import Hashable

import torch

from torchembed.sharding.planning.storage_costs import HeldRows, held_rows
from torchembed.tables import Storage, TableSpec

ROUNDED_ID_BYTES = 16
"""Memory of the keys of rounding for each row of a dynamic table: a key and an offset."""


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

    def table_group(self, num_columns: int, storage: Storage | None = None) -> Hashable:
        """Key that is equal for the shards which a rank looks up and updates in one call."""
        return num_columns, self.spec.dtype, self.pooled, self.spec.index, storage

    @property
    def is_rounded(self) -> bool:
        """True where updates round rows, by random numbers that follow from a key of each row."""
        return self.spec.dtype.itemsize < 4

    def index_bytes(self, num_rows: int) -> int:
        """Bytes of what finds the rows of ids, and of the keys of rounding where those are kept:
        they are where ids come in any order."""
        takes_any_id = self.spec.index.takes_any_id
        keys = ROUNDED_ID_BYTES * num_rows if self.is_rounded and takes_any_id else 0
        return self.spec.index.bytes_for(num_rows) + keys

    def held_rows(self, storage: Storage | None, num_rows: int, line_bytes: int) -> HeldRows:
        """The memories that hold ``num_rows`` of the table, of ``line_bytes`` each with state."""
        takes_any_id = self.spec.index.takes_any_id
        return held_rows(
            storage, num_rows, line_bytes, is_rounded=self.is_rounded, takes_any_id=takes_any_id
        )
