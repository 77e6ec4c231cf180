"""Rows of a group of tables in the memory of the host, and behind it on disk."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.tables.tiers.held_rows import AnnouncedRows, HeldRows
from torchembed.tables.tiers.initial_lines import InitialLines, RowIdentities
from torchembed.tables.tiers.line_moves import MovedLines
from torchembed.tables.tiers.line_store import LineStore


class HostLines:
    """Rows at places of host memory, each a copy of a line on disk or newer than it.

    Which row is at which place, the device knows. Calls come from one thread at a time,
    but for :meth:`read_ahead`.

    Args:
        tensors: a weight ``[H, D]`` and its states, in the memory of the host.
        store: of their lines.
        initial: makes the rows that have none.

    Attributes:
        held: the rows that are at places, as far as the host knows. Those that leave theirs, and
            that announced batches use, are announced to the store.
    """

    def __init__(self, tensors: Sequence[Tensor], store: LineStore, initial: InitialLines) -> None:
        self.tensors, self.store, self.initial = list(tensors), store, initial
        self.held = HeldRows(len(tensors[0]))

    @torch.no_grad()
    def move(self, moves: MovedLines) -> None:
        """Write the rows that leave their places, and read those that come there."""
        is_written = moves.written_rows >= 0
        self.save(moves.places[is_written], moves.written_rows[is_written])
        self.load(moves.places, moves.read_rows, moves.identities)

    def save(self, places: Tensor, rows: Tensor) -> None:
        """Write the lines of ``rows``, int64 ``[n]``, which are at ``places``."""
        if len(rows):
            self.store.write(rows, self.store.layout.packed(self.tensors, places))

    def load(self, places: Tensor, rows: Tensor, identities: RowIdentities | None) -> None:
        """Read ``rows``, int64 ``[n]``, to ``places``; those without a line as they were at first.

        Args:
            identities: of the rows of dynamic tables.
        """
        gone = self.held.note(places, rows)
        self._read(self.tensors, places, rows, identities)
        if len(gone):
            self.store.announce(gone)

    def read_ahead(self, rows: Tensor, num_rows: int, buffer_bytes: int) -> AnnouncedRows:
        """Have the lines of rows read ahead that are not in host memory, or leave it, for a batch
        to come. Any thread may call it; it waits while lines are written.

        Args:
            rows: int64 ``[n]`` on the CPU.
            num_rows: of the group.
            buffer_bytes: as of :meth:`LineStore.announce`.

        Returns:
            What was announced, to be retired.

        Raises:
            Exception: what reading ahead failed with before.
        """
        held, store = self.held, self.store
        number, absent = held.announce(rows.numpy(), num_rows)
        return AnnouncedRows(held, number, store.announce(absent, buffer_bytes))

    @torch.no_grad()
    def read(
        self, rows: Tensor, identities: RowIdentities | None, num_tensors: int | None = None
    ) -> list[Tensor]:
        """The weight and the states, or the first so many of them, of ``rows``, int64 ``[n]``, as
        they are on disk; arguments otherwise as for :meth:`load`."""
        found = self.store.layout.empty(len(rows), num_tensors)
        self._read(found, torch.arange(len(rows), device="cpu"), rows, identities)
        return found

    def _read(
        self,
        tensors: Sequence[Tensor],
        places: Tensor,
        rows: Tensor,
        identities: RowIdentities | None,
    ) -> None:
        lines, have_lines = self.store.read(rows)
        if identities is not None:
            # What is under the number of a new row is of the id that had it before.
            have_lines &= ~identities.are_new
        layout = self.store.layout
        if bool(have_lines.all()):
            layout.unpack(lines, tensors, places)
            return
        layout.unpack(lines[have_lines], tensors, places[have_lines])
        others = ~have_lines
        if identities is not None:
            identities = RowIdentities(identities.ids[others], identities.are_new[others])
        made = layout.empty(int(others.sum()), len(tensors))
        self.initial.fill(made, rows[others], identities)
        for tensor, new in zip(tensors, made, strict=True):
            tensor.index_copy_(0, places[others], new)
