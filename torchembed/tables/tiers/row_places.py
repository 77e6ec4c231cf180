"""Places of a group's rows in the memory of the host."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.ops.row_cache import RowMoves, exchange_places, find_cached, move_rows
from torchembed.tables.deferred_interrupts import interrupts_deferred

MAX_ROWS = 2**31
"""Places are int32, so that a group in host memory has fewer rows than these."""

_ROWS_AT_ONCE = 1 << 20
"""Rows that are brought to their own places at a time."""


class RowPlaces:
    """The places of a group's rows in host memory, as many as there are rows.

    At first each row lies at the place of its own number. A row that makes room in a cache is
    written to the place of the row that takes its slot, which is read from there. So a GPU
    translates one address of the host for both, which takes longer than the line itself.

    Args:
        num_rows: R, of the group.
        device: of the cache.

    Raises:
        ValueError: for 2**31 rows or more.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        if num_rows >= MAX_ROWS:
            raise ValueError(
                f"tables of one width and optimizer in host memory must have fewer than {MAX_ROWS} "
                f"rows together, got {num_rows}; shard them, or put some into another module"
            )
        self._place_of_row = torch.arange(num_rows, dtype=torch.int32, device=device)

    def find(self, rows: Tensor) -> Tensor:
        """The place of each of ``rows [n]``, int32 or int64; -1 for row -1. Of their dtype."""
        return find_cached(self._place_of_row, rows)

    def exchanged(self, moves: RowMoves) -> RowMoves:
        """``moves`` of rows as moves of their places, in ascending order of these, which a GPU
        translates faster than others; see :func:`torchembed.ops.row_cache.exchange_places`."""
        return exchange_places(self._place_of_row, moves)

    @interrupts_deferred()
    def restore(self, stored: Sequence[Tensor]) -> None:
        """Bring each row to the place of its own number. Waits for a GPU.

        Args:
            stored: ``[R, ...]`` each, what lies at the places; changed.
        """
        own_places = torch.arange(len(self._place_of_row), device=self._place_of_row.device)
        away = (self._place_of_row != own_places).nonzero().flatten().cpu()
        if not len(away):
            return
        place_of = self._place_of_row.to("cpu", torch.int64, copy=True)
        row_at = torch.arange(len(place_of), device="cpu")
        row_at[place_of[away]] = away
        for rows in away.split(_ROWS_AT_ONCE):
            # All rows before these are at their own places, so that what lies at the places of
            # these is of these rows, or of later ones, which change places with them.
            sources, others = place_of[rows], row_at[rows]
            is_other = others > rows[-1]
            others, left_places = others[is_other], sources[sources > rows[-1]]
            lines, other_lines = _read(stored, sources), _read(stored, rows[is_other])
            _write(stored, rows, lines)
            _write(stored, left_places, other_lines)
            place_of[others], row_at[left_places] = left_places, others
        self._place_of_row.copy_(own_places)


def _read(stored: Sequence[Tensor], places: Tensor) -> list[Tensor]:
    """Copies ``[n, ...]`` of what lies at ``places``, int64 ``[n]``."""
    lines = [tensor.new_empty(len(places), *tensor.shape[1:]) for tensor in stored]
    move_rows(_moves(torch.full_like(places, -1), places), lines, stored)
    return lines


def _write(stored: Sequence[Tensor], places: Tensor, lines: Sequence[Tensor]) -> None:
    """Write ``lines [n, ...]`` to ``places``, int64 ``[n]``."""
    move_rows(_moves(places, torch.full_like(places, -1)), lines, stored)


def _moves(written: Tensor, read: Tensor) -> RowMoves:
    slots = torch.arange(len(read), dtype=torch.int32, device="cpu")
    return RowMoves(slots, written, read, torch.tensor([len(read)], device="cpu"))
