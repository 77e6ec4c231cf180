"""Several tables in one flat tensor, grouped by width."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.tables import Disk, DiskGroup, HostGroup, Table, TableGroup


class FlatTables:
    """Tables in one flat ``[elements]``; those of one width are contiguous and form a group.

    Args:
        tables: this rank's tables, in TorchRec's order.
        feature_tables: for each feature, the index of its table.
        flat: memory of all rows, of the device or, where the tables live there, of the host; on the
            meta device where they are on disk.
        device: that looks the rows up.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        feature_tables: Sequence[int],
        flat: Tensor,
        device: torch.device,
    ) -> None:
        self.groups: list[TableGroup] = []
        self.features: list[list[int]] = []
        """For each group, the features that look up in it."""
        self.spans: list[tuple[int, int]] = []
        """For each group, its first element and the one after its last."""
        self.offsets = [0] * len(tables)
        """First element of each table."""
        first_rows = [0] * len(tables)
        begin = 0
        for width in dict.fromkeys(table.num_columns for table in tables):
            numbers = [n for n, table in enumerate(tables) if table.num_columns == width]
            members = [tables[n] for n in numbers]
            end = begin + width * sum(table.num_rows for table in members)
            rows = flat[begin:end].view(-1, width)
            storage = members[0].spec.storage
            if storage is None:
                group = TableGroup(members, rows)
            else:
                if isinstance(storage, Disk):
                    group = DiskGroup(members, rows, device)
                else:
                    group = HostGroup(members, rows, device, keeps_weight=True)
            for number, first_row in zip(numbers, group.first_rows, strict=False):
                first_rows[number] = first_row
                self.offsets[number] = begin + first_row * width
            self.groups.append(group)
            self.features.append([f for f, table in enumerate(feature_tables) if table in numbers])
            self.spans.append((begin, end))
            begin = end
        # Arguments of linearize_ids for each feature; FBGEMM's check of ids takes num_rows too.
        self.first_rows = torch.tensor([first_rows[t] for t in feature_tables], device=device)
        self.num_rows = torch.tensor([tables[t].num_rows for t in feature_tables], device=device)
        wide = any(group.rows_dtype is torch.int64 for group in self.groups)
        self.rows_dtype = torch.int64 if wide else torch.int32

    @property
    def num_features(self) -> int:
        return self.first_rows.numel()
