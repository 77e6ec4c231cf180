"""Tables by the memory of their rows, or by number: what a program of ``torch.compile`` knows of
them."""

import itertools
import weakref
from typing import TYPE_CHECKING

from torch import Tensor

from torchembed.core.stand_ins import address_of

if TYPE_CHECKING:
    from torchembed.tables.table import Table

_tables_at: "weakref.WeakValueDictionary[int, Table]" = weakref.WeakValueDictionary()
"""The table that was last put at an address."""
_tables_numbered: "weakref.WeakValueDictionary[int, Table]" = weakref.WeakValueDictionary()
_next_number = itertools.count()


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


def number_for(table: "Table") -> int:
    """A number by which :func:`table_numbered` finds ``table`` while it lives, in this process."""
    number = next(_next_number)
    _tables_numbered[number] = table
    return number


def table_numbered(number: int) -> "Table":
    """The table that :func:`number_for` gave ``number``."""
    return _tables_numbered[number]
