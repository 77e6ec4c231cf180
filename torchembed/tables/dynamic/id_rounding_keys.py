"""Keys of the rounding of rows whose ids come in any order."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.core.random_bits import GOLDEN, signed64
from torchembed.ops.hash_table import InsertedKeys
from torchembed.ops.rowwise_update import RoundingKeys
from torchembed.tables.row_index import IndexedTable


class IdRoundingKeys:
    """A key for each row of a group, from which the rounding of its updates is drawn: a function of
    the row's table and id. They take no memory until :meth:`keep`.

    Args:
        tables: of the group, in order.
        device: of the group.
    """

    def __init__(self, tables: Sequence[IndexedTable], device: torch.device) -> None:
        self._tables, self._device = list(tables), device
        self._num_rows = sum(table.num_rows for table in tables)
        self._table_keys = torch.tensor([t.key for t in tables], dtype=torch.int64, device=device)
        self._keys: Tensor | None = None
        """int64 ``[R + 1]``; None before an update asked for them. The last element is none."""

    def over(self, tables: Sequence[IndexedTable], ids: Tensor) -> "IdRoundingKeys":
        """Keys of ``tables`` with other rows, of ``ids [R]``; kept where these are."""
        made = IdRoundingKeys(tables, self._device)
        if self._keys is not None:
            made.keep(ids)
        return made

    def keep(self, ids: Tensor) -> None:
        """Keep keys from now on, of rows with ``ids [R]``, in the same memory in each call."""
        if self._keys is None:
            self._keys = torch.empty(self._num_rows + 1, dtype=torch.int64, device=self._device)
        self.refresh(ids)

    def refresh(self, ids: Tensor) -> None:
        """Bring the keys in line with ``ids``, int64 ``[R]``, where they are kept."""
        if self._keys is None:
            return
        first = 0
        for number, table in enumerate(self._tables):
            rows = slice(first, first + table.num_rows)
            numbers = torch.arange(rows.start, rows.stop, device=self._device)
            keys = _rounding_keys(self._table_keys[number], ids[rows], numbers)
            self._keys[rows].copy_(keys)
            first = rows.stop

    def note(self, new: InsertedKeys) -> None:
        """Bring the keys of rows in line that were given to new ids. Never waits for a GPU."""
        if self._keys is None:
            return
        keys = _rounding_keys(self._table_keys[new.tables.long()], new.keys, new.new_slots)
        # Entries that hold no row write to the last element, which is no row's.
        places = torch.where(new.new_slots < 0, len(self._keys) - 1, new.new_slots)
        self._keys.scatter_(0, places, keys)

    def for_updates(self) -> RoundingKeys:
        """The keys that are kept, as row updates take them; later ids change them in place."""
        assert self._keys is not None
        offsets = torch.arange(self._num_rows + 1, device=self._device)
        columns = None
        if any(table.first_column for table in self._tables):
            of_tables = [torch.full((t.num_rows,), t.first_column) for t in self._tables]
            columns = torch.cat(of_tables).to(self._device)
        return RoundingKeys(offsets, self._keys[: self._num_rows], columns)


def _rounding_keys(table_key: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """The keys under which rows of the group draw what their ids draw, int64;
    see :func:`~torchembed.tables.shifted_row_key`."""
    return table_key + (ids - rows) * signed64(GOLDEN)
