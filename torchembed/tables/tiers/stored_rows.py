"""The rows of a group on disk, read and rewritten where they are stored."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchembed.tables.tiers.host_lines import HostLines
from torchembed.tables.tiers.line_copies import ROWS_AT_ONCE, MovedRows, change_lines, copy_lines
from torchembed.tables.tiers.row_owners import RowOwners


class StoredRows:
    """A group's rows with their optimizer state, as they are on disk, or at first where they have
    no line. What the device and host memory hold is the caller's: to be written back before, and
    forgotten after a change. No lines may be moving.

    Args:
        lines: whose store and initial rows are used, those that it has at each call.
        owners: of the rows.
    """

    def __init__(self, lines: HostLines, owners: RowOwners) -> None:
        self._lines, self._owners = lines, owners

    def read(self, rows: Tensor, *, with_states: bool = True) -> list[Tensor]:
        """The weight ``[n, D]`` and the states of ``rows``, int64 ``[n]`` on any device. Copies on
        the CPU; waits for a GPU."""
        identities = self._owners.identities_on_host(rows)
        return self._lines.read(rows.cpu(), identities, None if with_states else 1)

    @torch.no_grad()
    def write(self, rows: Tensor, values: Sequence[Tensor | None]) -> None:
        """Write ``rows``, int64 ``[n]`` on the CPU, each once.

        Args:
            values: the weight ``[n, D]`` and each state, converted to the dtypes here; None for
                what stays as it is.
        """
        found = self.read(rows)
        for tensor, given in zip(found, values, strict=True):
            if given is not None:
                tensor.copy_(given)
        self._write_lines(rows, found)
        self._owners.note(rows, are_new=False)

    def _write_lines(self, rows: Tensor, tensors: Sequence[Tensor]) -> None:
        self._lines.store.write(rows, self._lines.store.layout.packed(tensors))

    @torch.no_grad()
    def reset_weights(self, rows: range) -> None:
        """Give the weights of ``rows`` the values that they have at first."""

        def change(some: Tensor, tensors: Sequence[Tensor]) -> None:
            self._lines.initial.fill(tensors[:1], some, self._owners.identities_on_host(some))

        change_lines(self._lines.store, rows, change)

    @torch.no_grad()
    def reset_states(self, rows: range) -> None:
        """Give the states of ``rows`` the values that they have at first."""

        def change(some: Tensor, tensors: Sequence[Tensor]) -> None:
            for state in tensors[1:]:
                state.fill_(self._lines.initial.initial_state)

        change_lines(self._lines.store, rows, change)

    def take_all(
        self, given: "StoredRows", *, with_states: bool = True, converts: bool = True
    ) -> None:
        """Take over all rows of a former one of the same group, converted to the dtypes here.

        Args:
            with_states: whether the optimizer states come along, which are as many here; else they
                are as at first.
            converts: False where lines are left out that would have to be converted.
        """
        own, source = self._lines.store, given._lines.store
        if with_states and own.layout.equals(source.layout):
            self._lines.store = source
        elif converts:
            initial_state = self._lines.initial.initial_state
            copy_lines(source, own, initial_state, with_states=with_states)

    def take_tables(
        self,
        given: "StoredRows",
        moved: Sequence[MovedRows],
        *,
        are_all: bool,
        with_states: bool,
    ) -> None:
        """Take over rows of another group, whose own are not used any more.

        Args:
            moved: the rows that are taken over.
            are_all: whether they are all rows of both groups, under the same numbers.
            with_states: as for :meth:`take_all`.
        """
        for rows in moved:
            self._owners.take(given._owners, *rows)
        own, source = self._lines.store, given._lines.store
        if are_all and own.layout.equals(source.layout):
            self._lines.store, given._lines.store = source, own
        else:
            initial_state = self._lines.initial.initial_state
            copy_lines(source, own, initial_state, with_states=with_states, moved=moved)

    @torch.no_grad()
    def saved(self) -> Path | None:
        """A new folder with a checkpoint of all rows that are not as they were at first, by their
        numbers; the caller's to move or remove. None where there are none.

        Raises:
            OSError, RowStoreError: if files cannot be written.
        """
        # Under the numbers of new rows are lines of the ids that had them before, or none.
        for rows in self._owners.new_rows().split(ROWS_AT_ONCE):
            self._write_lines(rows, self.read(rows))
        self._owners.note_none()
        return self._lines.store.saved()

    def replace(self, checkpoint: Path | None) -> None:
        """Take all rows of what :meth:`saved` made in place of these; None: all rows are as they
        were at first. The checkpoint stays as it is.

        Raises:
            OSError, ValueError, RowStoreError: as ``RocksDBStore.restore``; nothing is changed.
        """
        self._lines.store.replace(checkpoint)
        self._owners.note_none()
