"""Groups of the kind that their tables' storage asks for."""

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.tables.group import TableGroup
from torchembed.tables.storage import Disk
from torchembed.tables.table import Table
from torchembed.tables.tiers import DiskGroup, HostGroup, host_tensor


def new_group(
    tables: Sequence[Table], dtype: torch.dtype, device: torch.device | str | None
) -> TableGroup:
    """A group of ``tables`` of one storage, with uninitialized rows.

    Args:
        device: that looks the rows up; None for torch's default device.

    Raises:
        torch.OutOfMemoryError: where there is no memory for them; it names the tables, their bytes
            and what to lower.
    """
    found = torch.empty(0, device=device).device
    # A system that overcommits would grant memory that it does not have, and end the process as
    # soon as what finds the rows is written there.
    bytes_of_ids = sum(table.spec.index.bytes_for(table.num_rows) for table in tables)
    if found.type == "cpu" and bytes_of_ids > _host_bytes():
        raise _out_of_memory(tables, dtype, found)
    try:
        return _made(tables, dtype, found)
    except RuntimeError as error:
        if not any(words in str(error) for words in ("allocate memory", "out of memory")):
            raise
        raise _out_of_memory(tables, dtype, found) from error


def _host_bytes() -> int:
    """The physical memory of this host in bytes, used or not."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _out_of_memory(
    tables: Sequence[Table], dtype: torch.dtype, device: torch.device
) -> torch.OutOfMemoryError:
    """The error of :func:`new_group` for ``tables`` that do not fit in memory."""
    row_bytes = sum(table.num_rows * table.num_columns * dtype.itemsize for table in tables)
    bytes_of_ids = sum(table.spec.index.bytes_for(table.num_rows) for table in tables)
    names = ", ".join(table.spec.name for table in tables)
    return torch.OutOfMemoryError(
        f"tables {names} take {row_bytes} bytes of rows, and {bytes_of_ids} of what finds them and "
        f"of their logs, for which there is no memory on {device} or its host; lower "
        "num_embeddings or deletion_log, shard them, or give them a storage"
    )


def _made(tables: Sequence[Table], dtype: torch.dtype, device: torch.device) -> TableGroup:
    shape = sum(table.num_rows for table in tables), tables[0].num_columns
    storage = tables[0].spec.storage
    if storage is None:
        return TableGroup(tables, torch.empty(shape, dtype=dtype, device=device))
    if isinstance(storage, Disk):
        return DiskGroup(tables, torch.empty(shape, dtype=dtype, device="meta"), device)
    return HostGroup(tables, host_tensor(shape, dtype, device), device)


def group_over(tables: Sequence[Table], stored_weight: Tensor) -> TableGroup:
    """A group of ``tables`` of one storage whose rows are ``stored_weight [R, D]``."""
    storage = tables[0].spec.storage
    if storage is None:
        return TableGroup(tables, stored_weight)
    device = tables[0].cache_device
    device = stored_weight.device if device is None else device
    kind = DiskGroup if isinstance(storage, Disk) else HostGroup
    return kind(tables, stored_weight, device)


def may_hold(table: Table, rows: Tensor) -> bool:
    """True if a group of ``table`` alone may take over ``rows [R, D]``, and need not copy them: the
    memory of the host that a GPU accesses is allocated for that."""
    storage, device = table.spec.storage, table.cache_device
    if storage is None or device is None or isinstance(storage, Disk):
        return True
    return device.type == rows.device.type
