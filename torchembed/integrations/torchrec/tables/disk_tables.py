"""Tables of TorchRec's kernels that live on disk, behind host memory and a cache on the device."""

import torch
from torch import Tensor

from torchembed.integrations.torchrec.tables.host_tables import HostTables
from torchembed.integrations.torchrec.tables.rows_on_disk import RowsOnDisk
from torchembed.tables import DiskGroup, FetchedRows, Table, TableGroup, TieredGroup


class DiskTables(HostTables):
    """Tables that backward updates, on disk.

    Forward brings the rows of a batch that may be trained into the cache as that of
    :class:`HostTables` does. What TorchRec sees of rows and states are :class:`RowsOnDisk`.

    A batch that uses more rows than the cache of one width, or host memory, has room for raises a
    ``RuntimeError``: on a GPU a later forward does.
    """

    @staticmethod
    def _allocated(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(num_elements, dtype=dtype, device="meta")

    def _shown(self, stored: Tensor) -> Tensor:
        return stored

    def _shown_rows(self, group: TableGroup, part: int, table: Table) -> Tensor:
        assert isinstance(group, DiskGroup)
        first = group.first_row_of(table)
        return RowsOnDisk(group, part, range(first, first + table.num_rows))

    def weight_of(self, name: str) -> Tensor:
        """The rows of table ``name``; those of several of its columns one after the other."""
        held = [table for table in self._tables if table.spec.name == name]
        group = held[0].group
        assert isinstance(group, DiskGroup)
        first, last = (group.first_row_of(held[number]) for number in (0, -1))
        return RowsOnDisk(group, 0, range(first, last + held[-1].num_rows))

    def reset_rows(self) -> None:
        """Give all rows their initial values; optimizer states stay."""
        for group in self.groups:
            for table in group.tables:
                group.fill_initial_rows(table)

    def _check_places(self, group: TieredGroup, fetched: FetchedRows) -> None:
        assert isinstance(group, DiskGroup)
        assert fetched.num_short is not None
        names = ", ".join(table.spec.name for table in group.tables)
        num_slots, num_places = (c.row_of_slot.numel() for c in (group.cache, group.host))

        def describe_short(_: int, num_short: int) -> str:
            return (
                f"tables {names} on disk share {num_places} rows of host memory, and a batch needs "
                f"{num_short} more beside those in the cache on the device; raise l2_cache_size of "
                "their KeyValueParams or host_rows of their storage, or train smaller batches"
            )

        def describe_refused(_: int, num_refused: int) -> str:
            return (
                f"tables {names} on disk share a cache of {num_slots} rows on the device, and a "
                f"batch uses {num_refused} more; raise load_factor of their CacheParams and "
                "max_l1_cache_size of their KeyValueParams, or cache_rows of their storage, or "
                "train smaller batches"
            )

        self._submit(fetched.num_short, describe_short)
        self._submit(fetched.num_refused, describe_refused)

    def flush(self) -> None:
        for group in self._tiered_groups:
            group.write_back()

    def reset_cache_states(self) -> None:
        """Nothing: what is cached is forgotten where rows are written."""
