"""Insertions of ids whose new rows have no values yet."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.ops.hash_table import HashTables, find_slots, int64_keys
from torchembed.tables.row_index import NewRows


class UnfinishedInsertion(NamedTuple):
    """The ids of a batch that are inserted, noted before it is done, so that rows which they were
    given are known where an exception, as of Ctrl-C, comes before these have values."""

    keys: Tensor
    """``[L]``."""
    tables: Tensor
    """int32 ``[L]``, -1 where there is no id."""
    slots: Tensor
    """int64 ``[L]``: those that they had before, -1 for none."""

    def new_rows(self, state: HashTables) -> NewRows:
        """The rows that they were given; an id that comes twice has two entries. Never waits for a
        GPU."""
        found = find_slots(state, self.keys, self.tables)
        rows = torch.where(self.slots < 0, found, -1)
        return NewRows(rows, int64_keys(self.keys), self.tables)
