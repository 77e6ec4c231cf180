"""The ids that the rows of a group on disk belong to, as the device knows them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.tables.row_index import RowIndex
from torchembed.tables.tiers.initial_lines import RowIdentities


class RowOwners:
    """The ids of a group's rows, and which rows were given to theirs so lately that a line under
    their number is of another id. Of static tables there is nothing to know.

    Args:
        index: of the group, to be replaced with it.
        first_rows: where each table begins, ``[T + 1]``.
        device: of the group.

    Attributes:
        are_new: bool ``[R + 1]``, of dynamic tables: rows that were given to ids, and that no batch
            has trained since. The last is no row's.
    """

    def __init__(self, index: RowIndex, first_rows: Sequence[int], device: torch.device) -> None:
        self.index, self._first_rows = index, first_rows
        self.are_new: Tensor | None = None
        if index.changes_on_admission:
            self.are_new = torch.zeros(first_rows[-1] + 1, dtype=torch.bool, device=device)

    def to(self, device: torch.device) -> None:
        """Move what is known to ``device``; from the meta device, nothing is known."""
        if self.are_new is None:
            return
        if self.are_new.is_meta:
            self.are_new = torch.zeros_like(self.are_new, device=device)
        else:
            self.are_new = self.are_new.to(device)

    def identities_of(self, rows: Tensor) -> RowIdentities | None:
        """The arguments of the initial values of ``rows [n]``, -1 for none; None in static tables.
        Never waits for a GPU."""
        if self.are_new is None:
            return None
        ids = torch.zeros_like(rows)
        for number, first in enumerate(self._first_rows[:-1]):
            of_table = self.index.row_ids(number)
            assert isinstance(of_table, Tensor)
            place = rows - first
            is_here = (place >= 0) & (place < len(of_table))
            ids = torch.where(is_here, of_table[place.clamp(0, len(of_table) - 1)], ids)
        return RowIdentities(ids, self.are_new[rows])

    def identities_on_host(self, rows: Tensor) -> RowIdentities | None:
        """:meth:`identities_of` rows on any device, on the host, for which it waits."""
        if self.are_new is None:
            return None
        found = self.identities_of(rows.to(self.are_new.device))
        return None if found is None else RowIdentities(*(one.cpu() for one in found))

    def note(self, rows: Tensor, *, are_new: bool) -> None:
        """Note of ``rows [n]``, -1 for none, whether they are new; nothing in static tables. Never
        waits for a GPU where they are on it."""
        if self.are_new is None:
            return
        rows, no_row = rows.to(self.are_new.device), len(self.are_new) - 1
        # By index_fill_: a captured step copies no number of the host.
        self.are_new.index_fill_(0, torch.where(rows < 0, no_row, rows).long(), are_new)

    def note_none(self) -> None:
        """Note that no row is new."""
        if self.are_new is not None:
            self.are_new.zero_()

    def new_rows(self) -> Tensor:
        """The rows that are new, int64 ``[n]`` on the CPU; waits for a GPU."""
        if self.are_new is None:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        return self.are_new[:-1].nonzero().flatten().cpu()

    def take(self, others: "RowOwners", first: int, first_here: int, num_rows: int) -> None:
        """Take over what ``others`` know of ``num_rows`` rows from ``first`` on, which have the
        numbers from ``first_here`` on here."""
        if self.are_new is not None and others.are_new is not None:
            found = others.are_new[first : first + num_rows]
            self.are_new[first_here : first_here + num_rows] = found
