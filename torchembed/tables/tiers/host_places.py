"""Places of rows in host memory, to which a thread brings their lines."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.row_caches import CacheCounter, RowCache
from torchembed.ops.row_cache import RowMoves, claim_slots, empty_row_cache, find_cached
from torchembed.tables.deferred_interrupts import interrupts_deferred
from torchembed.tables.tiers.fetched_rows import FetchedRows
from torchembed.tables.tiers.host_lines import HostLines
from torchembed.tables.tiers.initial_lines import RowIdentities
from torchembed.tables.tiers.line_moves import (
    LineMover,
    MoveBuffer,
    MovedLines,
    RecordedMoves,
    recorded_moves,
)
from torchembed.tables.tiers.row_owners import RowOwners


class PlaceClaim(NamedTuple):
    """Places that the rows of a batch were given."""

    num_moved: Tensor
    """int64 ``[1]``: the rows whose lines are to be read there."""
    num_short: Tensor
    """int64 ``[1]``: how many places are too few; no row was given one then that had none."""


class HostPlaces:
    """The places of a group's rows in host memory, which a device gives to those of batches; a
    thread writes the lines of the rows that leave theirs, and reads those that come.

    Args:
        num_rows: of the group.
        num_places: in the memory that ``lines`` have.
        lines: what is at the places, and on disk.
        owners: of the rows.
        mover: moves the lines.
        device: that chooses.

    Attributes:
        cache: which rows the places hold, its slots being these.
    """

    def __init__(
        self,
        num_rows: int,
        num_places: int,
        lines: HostLines,
        owners: RowOwners,
        mover: LineMover,
        device: torch.device,
    ) -> None:
        self._lines, self._owners, self._mover, self._device = lines, owners, mover, device
        self._last_use = torch.zeros(num_places + 1, dtype=torch.int64, device=device)
        """The last use of each place; the last element belongs to no place."""
        empty = empty_row_cache(num_rows, num_places, device)
        self.cache: RowCache = empty._replace(last_use=self._last_use[:-1])
        self._loading_epoch = torch.zeros(1, dtype=torch.int64, device=device)
        self._buffers = dict[int, list[MoveBuffer]]()

    def find(self, rows: Tensor) -> Tensor:
        """The place of each of ``rows [n]``; -1 for row -1, and for rows that have none."""
        return find_cached(self.cache.slot_of_row, rows)

    @interrupts_deferred()  # A row that is said to have a place must come there.
    def claim(
        self,
        fetched: FetchedRows,
        rows_in_slots: Tensor,
        *,
        released: Tensor,
        is_trained: Tensor | None,
    ) -> PlaceClaim:
        """Give the rows of a batch places, and have their lines read there.

        Args:
            rows_in_slots: int64 ``[C]``, -1 for none: those on the device, which keep their places.
            released: int64 ``[1]``: the epoch of the last batch that needs its rows no more.
            is_trained: bool ``[1]``, False where nothing is to change; None for True.
        """
        # Rows in slots are written back to their places, which are in use for as long.
        places = self.find(rows_in_slots)
        places = torch.where(places < 0, self._last_use.numel() - 1, places)
        last_use = self._last_use[places]
        self._last_use[places] = (fetched.epoch + 1).expand_as(places)
        claim = claim_slots(
            self.cache,
            fetched.unique_rows,
            fetched.num_rows,
            epoch=fetched.epoch,
            released=released,
            is_trained=is_trained,
        )
        now = self._last_use[places]
        self._last_use[places] = torch.where(now > fetched.epoch, last_use, now)
        identities = self._owners.identities_of(claim.moves.read_rows)
        if identities is not None:
            is_claimed = claim.num_refused == 0
            if is_trained is not None:
                is_claimed = is_claimed & is_trained
            self._owners.note(torch.where(is_claimed, fetched.unique_rows, -1), are_new=False)
        self._submit(claim.moves, identities)
        return PlaceClaim(claim.moves.count, claim.num_refused)

    def _submit(self, moves: RowMoves, identities: RowIdentities | None) -> None:
        """Have lines moved as ``moves`` of places say; where a call is captured, by each replay."""
        num_moves = moves.slots.numel()
        free = self._buffers.setdefault(num_moves, [])
        if free:
            buffer = free.pop()
        else:
            has_identities, device = identities is not None, self._device
            buffer = self._mover.made(lambda: MoveBuffer(num_moves, has_identities, device))
        buffer.copy_from(moves, identities)
        lines, recorded = self._lines, recorded_moves()
        if recorded is not None:
            recorded.append(RecordedMoves(self._mover, buffer, lines.move))
            return

        def move(moved: MovedLines) -> None:
            lines.move(moved)
            free.append(buffer)

        self._mover.submit(buffer, move)

    def is_loading(self, epoch: Tensor, claim: PlaceClaim) -> Tensor:
        """bool ``[1]``: whether lines are read for the batch of ``epoch``, int64 ``[1]``, be it for
        this ``claim`` or for one before: a batch may come in several parts."""
        last = torch.where(claim.num_moved > 0, epoch, self._loading_epoch)
        self._loading_epoch.copy_(last)
        return last == epoch

    def save_trained(self, released: Tensor) -> None:
        """Write the lines of all rows that were trained since they were read; they stay where they
        are. Waits for a GPU.

        Args:
            released: as for :meth:`claim`.
        """
        places = self.cache.is_dirty.nonzero().flatten()
        if len(places):
            self._lines.save(places.cpu(), self.cache.row_of_slot[places].cpu())
            self.cache.counters[CacheCounter.WRITTEN_ROWS] += len(places)
            # Those of batches that were prepared ahead are still to be trained.
            self.cache.is_dirty.copy_(self.cache.last_use > released)

    @interrupts_deferred()
    def forget(self, released: Tensor) -> None:
        """Take their places from all rows, without writing lines; those of batches under way are
        read anew. Waits for a GPU.

        Args:
            released: as for :meth:`claim`.
        """
        cache, is_used = self.cache, self.cache.last_use > released
        left = (~is_used).nonzero().flatten()
        rows = cache.row_of_slot[left]
        cache.slot_of_row[rows[rows >= 0]] = -1
        for state, nothing in (
            (cache.row_of_slot, -1),
            (cache.last_use, 0),
            (cache.is_recent, False),
            (cache.is_dirty, False),
        ):
            state[left] = nothing
        places = is_used.nonzero().flatten()
        rows = cache.row_of_slot[places]
        self._lines.held.forget()
        self._lines.load(places.cpu(), rows.cpu(), self._owners.identities_on_host(rows))
