"""Tables by the memory of their rows: what a program of ``torch.compile`` knows of them."""

import weakref
from typing import TYPE_CHECKING

from torch import Tensor

from torchembed.core.stand_ins import address_of

if TYPE_CHECKING:
    from torchembed.tables.table import Table

_tables_at: "weakref.WeakValueDictionary[int, Table]" = weakref.WeakValueDictionary()
"""The table that was last put at an address."""


def note_address(table: "Table") -> None:
    """Let :func:`table_at` find ``table``, whose parameter was given memory."""
    address = address_of(table.parameter)
    if address and table.num_rows:
        _tables_at[address] = table


def table_at(rows: Tensor) -> "Table | None":
    """The table whose parameter has the memory and the shape of ``rows``; None where none has."""
    table = _tables_at.get(rows.data_ptr())
    if table is None or address_of(table.parameter) != rows.data_ptr():
        return None
    return table if table.parameter.shape == rows.shape else None
