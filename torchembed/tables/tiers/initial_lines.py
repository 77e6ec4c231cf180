"""Rows that no disk holds, as they were before anything trained them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.ops.initialize_rows import InitialValues, initialize_rows
from torchembed.tables.initial_values import initial_values
from torchembed.tables.table import Table


class RowIdentities(NamedTuple):
    """The arguments of which the initial values of rows of dynamic tables are functions."""

    ids: Tensor
    """int64 ``[n]``: the id that each row belongs to."""
    are_new: Tensor
    """bool ``[n]``: rows that were given to their ids, and that no batch has trained since."""


class InitialLines(NamedTuple):
    """Makes rows of a group of tables as they were at first; on the CPU."""

    tables: Sequence[Table]
    first_rows: Sequence[int]
    """The first row of each table, ``[T + 1]``; the last element is the end of the last one."""
    initial_state: float
    """Every element of the optimizer state."""
    values: InitialValues | None
    """The values of new rows; None where all rows are there from the start."""

    def fill(
        self, tensors: Sequence[Tensor], rows: Tensor, identities: RowIdentities | None
    ) -> None:
        """Fill ``tensors``, a weight ``[n, D]`` and its states, with ``rows``, int64 ``[n]``, of
        the group.

        Args:
            identities: of the rows of dynamic tables; None for rows whose ids are their numbers.
        """
        weight, *states = tensors
        for state in states:
            state.fill_(self.initial_state)
        # The first row of a table is none of the one before it.
        bounds = torch.tensor(self.first_rows[1:-1], dtype=torch.int64, device="cpu")
        numbers = torch.bucketize(rows, bounds, right=True)
        for number, table in enumerate(self.tables):
            places = (numbers == number).nonzero().flatten()
            if not len(places):
                continue
            ids = rows[places] - self.first_rows[number] + table.first_row
            if identities is not None:
                ids = identities.ids[places]
            found = torch.empty(len(places), weight.shape[1], dtype=weight.dtype, device="cpu")
            table.fill_rows(found, ids)
            weight[places] = found
        if identities is not None and self.values is not None:
            places = torch.arange(len(rows), device="cpu").masked_fill(~identities.are_new, -1)
            initialize_rows(weight, [], places, identities.ids, numbers.int(), self.values)


def initial_lines(
    tables: Sequence[Table], first_rows: Sequence[int], initial_state: float, *, are_dynamic: bool
) -> InitialLines:
    """An :class:`InitialLines` for the rows of a group.

    Args:
        tables, first_rows, initial_state: as of :class:`InitialLines`.
        are_dynamic: whether the tables give rows to new ids.
    """
    values = None
    if are_dynamic:
        values = initial_values([t.as_initialized() for t in tables], torch.device("cpu"))
    return InitialLines(tables, first_rows, initial_state, values)
