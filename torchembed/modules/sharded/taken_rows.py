"""Rows that a shard takes over from the table that is sharded."""

import torch
from torch import Tensor

from torchembed.tables import Disk, DiskGroup, RowChunk, Table, row_ranges, write_rows

_CHUNK_BYTES = 1 << 26


def check_untrained(table: Table) -> None:
    """Raise ``ValueError`` for a whole table on disk that was trained: its rows are no shard's."""
    group = table.group
    if isinstance(group, DiskGroup) and group.is_trained:
        raise ValueError(
            f"table {table.spec.name} on disk was trained before it is sharded; shard it first, "
            "and load its rows from a checkpoint"
        )


@torch.no_grad()
def take_rows(shard: Table, rows: Tensor) -> None:
    """Give ``shard`` its ``rows [n, D]``; on disk those that are others than it has at first."""
    if not isinstance(shard.spec.storage, Disk):
        shard.parameter.data.copy_(rows)
        return
    for part in row_ranges(len(rows), rows[:1].nbytes, _CHUNK_BYTES):
        keys = torch.arange(part.start, part.stop) + shard.first_row
        given = rows[part.start : part.stop].cpu()
        at_first = torch.empty_like(given)
        shard.fill_rows(at_first, keys)
        differ = (given != at_first).any(1)
        if differ.any():
            write_rows(shard, RowChunk(keys[differ], given[differ], {}))
