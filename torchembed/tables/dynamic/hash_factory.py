"""The factory of hash indices: the rows and bytes that a dynamic table takes, before it is made."""

import dataclasses
from collections.abc import Sequence

import torch

from torchembed.ops.hash_table import TableShape, growing_shapes, table_shape
from torchembed.tables.dynamic.deletion_log import DeletionLog
from torchembed.tables.dynamic.hash_index import HashIndex
from torchembed.tables.dynamic.hash_shapes import shape_with
from torchembed.tables.dynamic.policies import Dynamic, index_bytes_of
from torchembed.tables.row_index import IndexedTable

_ROW_NUMBER_BYTES = 8


@dataclasses.dataclass(frozen=True)
class HashFactory:
    """Makes :class:`HashIndex`."""

    dynamic: Dynamic

    takes_any_id = True

    def rows_for(self, capacity: int) -> int:
        """``capacity``, or a few more so that buckets are equally large, and the rows that ids
        share."""
        shape = growing_shapes(capacity)[-1] if self.grows else table_shape(capacity)
        return shape.num_rows + self.dynamic.num_hashed_rows

    def rows_of_part(self, num_rows: int, num_parts: int) -> int:
        num_hashed = self.dynamic.num_hashed_rows
        return self.rows_for(-(-(num_rows - num_hashed) // num_parts))

    @property
    def grows(self) -> bool:
        return self.dynamic.initial_capacity is not None

    def initial_rows(self, num_rows: int, of_rows: int) -> int:
        """The same part of the initial capacity as ``num_rows`` are of the table's ``of_rows``."""
        wanted, num_hashed = self.dynamic.initial_capacity, self.dynamic.num_hashed_rows
        if wanted is None or not num_rows:
            return num_rows
        own, of_whole = num_rows - num_hashed, of_rows - num_hashed
        sizes = (shape.num_rows for shape in growing_shapes(own))
        return num_hashed + next((n for n in sizes if n * of_whole >= wanted * own), own)

    def added_rows(self, num_rows: int, of_rows: int) -> int:
        if self.initial_rows(num_rows, of_rows) == num_rows:
            return 0
        own = num_rows - self.dynamic.num_hashed_rows
        return own - growing_shapes(own)[-2].num_rows

    @property
    def moved_row_bytes(self) -> int:
        """Bytes that the index holds of a row, and of the number of the row that it becomes."""
        return index_bytes_of(self.dynamic) + _ROW_NUMBER_BYTES if self.grows else 0

    def shape_with(self, num_rows: int, max_rows: int) -> TableShape | None:
        """The shape of a part that grows to ``max_rows`` while it has ``num_rows``; None where it
        never has as many."""
        return shape_with(self.dynamic, num_rows, max_rows)

    def bytes_for(self, num_rows: int) -> int:
        """Ids, digests, epochs of the last use and, but for LRU, scores; what chooses the ids that
        get rows; and the log of those that left."""
        admission = self.dynamic.admission
        counts = 0 if admission is None else admission.bytes_for(num_rows)
        logged = self.dynamic.deletion_log * DeletionLog.ENTRY_BYTES
        return num_rows * index_bytes_of(self.dynamic) + counts + logged

    def __call__(self, tables: Sequence[IndexedTable], device: torch.device) -> HashIndex:
        return HashIndex(tables, self.dynamic, device)
