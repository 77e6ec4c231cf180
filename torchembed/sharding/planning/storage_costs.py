"""Costs of tables in host memory and on disk: bytes on the device, on the host and on the disk."""

import os
from typing import NamedTuple

from torchembed.tables import Disk, HostMemory, Storage, padded_line_bytes
from torchembed.tables.storage import rows_held

ROW_INDEX_BYTES = 8
"""Memory on the device for each row that is not stored there: the numbers of its slot in the cache
and of its place in host memory, four bytes each."""
SLOT_BYTES = 18
"""Memory of a cache, on the device, for each of its slots, beside the row: which row it holds, and
its use. Places in host memory of rows on disk are slots in that."""
ROUNDED_SLOT_BYTES = 24
"""Memory for each slot of the keys of rounding, where updates round rows: a key, an offset and a
column."""
LINE_INDEX_BYTES = 6
"""Memory of the host, for each row on disk, of what finds it there."""
NEW_ROW_BYTES = 1
"""Memory on the device, for each row on disk of a dynamic table: whether it has a line there."""


class PlannedCache(NamedTuple):
    """The rows of a table that is not on the devices, counted by place over all ranks."""

    num_cached: int
    """Rows that devices cache."""
    num_in_host: int | None = None
    """Rows in host memory of a table on disk; None: all are there, and none on disk."""

    def storage(self, num_parts: int, path: str | os.PathLike[str] | None) -> Storage:
        """The storage of each of ``num_parts`` that divide the rows.

        Args:
            path: of the disk; only of a table on disk it must be given.
        """
        cache_rows = -(-self.num_cached // num_parts)
        if self.num_in_host is None:
            return HostMemory(cache_rows=cache_rows)
        assert path is not None
        host_rows = -(-self.num_in_host // num_parts)
        return Disk(path=path, host_rows=host_rows, cache_rows=cache_rows)


class HeldRows(NamedTuple):
    """The rows of a shard, counted by place."""

    on_device: int
    in_host: int = 0
    on_disk: int = 0
    index_bytes: int = 0
    """Memory on the device of what finds cached rows, and rows in host memory of those on disk."""
    host_index_bytes: int = 0
    """Memory of the host of what finds rows on disk."""


def held_rows(
    storage: Storage | None,
    num_rows: int,
    line_bytes: int,
    *,
    is_rounded: bool,
    takes_any_id: bool,
) -> HeldRows:
    """The memories that hold ``num_rows``, each of ``line_bytes`` with its optimizer state. Rows
    that are in several places count in each.

    Args:
        is_rounded: True where updates round rows.
        takes_any_id: True for a dynamic table.
    """
    if storage is None:
        return HeldRows(num_rows)
    cached = rows_held(
        storage.cache_rows, storage.cache_bytes, num_rows=num_rows, line_bytes=line_bytes
    )
    index_bytes = cache_index_bytes(cached, num_rows, is_rounded=is_rounded)
    if not isinstance(storage, Disk):
        return HeldRows(cached, num_rows, index_bytes=index_bytes)
    in_host = rows_held(
        storage.host_rows, storage.host_bytes, num_rows=num_rows, line_bytes=line_bytes
    )
    index_bytes += place_index_bytes(in_host, num_rows, takes_any_id=takes_any_id)
    return HeldRows(cached, in_host, num_rows, index_bytes, num_rows * LINE_INDEX_BYTES)


def host_line_bytes(storage: Storage | None, row_bytes: int, state_bytes: int) -> int:
    """Bytes of host memory that a row of ``row_bytes`` takes with its optimizer state, where rows
    of ``storage`` are there."""
    if isinstance(storage, HostMemory):
        return padded_line_bytes(row_bytes, state_bytes)
    return row_bytes + state_bytes


def cache_index_bytes(num_cached: int, num_rows: int, *, is_rounded: bool) -> int:
    """Bytes that a cache of ``num_cached`` of ``num_rows`` takes on the device beside them, and
    what finds the others in host memory."""
    slot_bytes = SLOT_BYTES + (ROUNDED_SLOT_BYTES if is_rounded else 0)
    return num_rows * ROW_INDEX_BYTES + num_cached * slot_bytes


def place_index_bytes(num_in_host: int, num_rows: int, *, takes_any_id: bool) -> int:
    """Bytes on the device of what knows which of ``num_rows`` on disk are in ``num_in_host`` places
    of host memory, beside their numbers."""
    of_row = NEW_ROW_BYTES if takes_any_id else 0
    return num_rows * of_row + num_in_host * SLOT_BYTES
