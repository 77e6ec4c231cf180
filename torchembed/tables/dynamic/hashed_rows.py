"""Rows that the ids of dynamic tables without a row of their own share, by a hash of the id."""

import dataclasses
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from torchembed.core.random_bits import name_key, random_bits, shift_right
from torchembed.ops.hash_table import SlotRange

# Drawn from other keys than slots (0), ranks (1) and the initial values of rows.
_PLACE_KEY = name_key(0, "hashed rows", "place")
_ID_KEY = name_key(0, "hashed rows", "id")


@dataclasses.dataclass(frozen=True)
class HashedRows:
    """Lets ids of a dynamic table that have no row of their own share additional rows.

    A hash of the id chooses the shared row, so that an id always reads the same one, and several
    ids may read one. Shared rows are trained as all others are, and never evicted. In evaluation
    ids that training has not met read them.
    """

    num_rows: int
    """The number of shared rows, beside the capacity; if ranks divide the table, on each rank."""

    def __post_init__(self) -> None:
        if isinstance(self.num_rows, bool) or not isinstance(self.num_rows, int):
            raise TypeError(f"num_rows must be an int, got {self.num_rows!r}")
        # A hash of 32 bits is multiplied by it.
        if not 1 <= self.num_rows < 2**31:
            raise ValueError(f"num_rows must be from 1 to {2**31 - 1}, got {self.num_rows}")


class SharedRows:
    """The :class:`HashedRows` of each table of a group: its last rows, behind those of its slots.

    Args:
        config: the same for all tables.
        tables: the slots of each table, and behind them the places of these rows.
        device: where ids come.

    Attributes:
        num_rows: that the ids of a table share.
        firsts: int64 ``[T]``: where those of each table begin in the group.
    """

    def __init__(
        self, config: HashedRows, tables: Sequence[SlotRange], device: torch.device
    ) -> None:
        self.num_rows = config.num_rows
        firsts = [slots.first_slot + slots.num_slots - config.num_rows for slots in tables]
        self.firsts = torch.tensor(firsts, dtype=torch.int64, device=device)
        self._place_key = torch.tensor(_PLACE_KEY, device=device)

    @classmethod
    def under(
        cls, missing: object, tables: Sequence[SlotRange], device: torch.device
    ) -> Self | None:
        """The shared rows of tables whose ids without a row are looked up as ``missing``; None
        where they share none."""
        return cls(missing, tables, device) if isinstance(missing, HashedRows) else None

    def set_ids(self, ids: Tensor) -> None:
        """Write the numbers that initial values and rounding of these rows are functions of, to
        their places in ``ids``, int64 ``[R]``."""
        places = torch.arange(self.num_rows, device=ids.device)
        numbers = numbers_of_shared_rows(self.num_rows, ids.device)
        ids[(self.firsts[:, None] + places).flatten()] = numbers.repeat(len(self.firsts))

    def rows(self, rows: Tensor, ids: Tensor, tables: Tensor) -> Tensor:
        """``rows``, int64 ``[L]``, with a shared row for each id that has none of its own.

        Args:
            rows: of the group, -1 for none.
            ids: int64 ``[L]``.
            tables: int32 ``[L]``: the table of each id; -1 where there is no id, and no row.
        """
        return with_shared_rows(rows, ids, tables, self.firsts, self.num_rows, self._place_key)


def numbers_of_shared_rows(num_rows: int, device: torch.device) -> Tensor:
    """Numbers in place of ids for each of ``num_rows`` shared rows of a table, int64
    ``[num_rows]``."""
    places = torch.arange(num_rows, device=device)
    return random_bits(torch.full_like(places, _ID_KEY), places)


def with_shared_rows(
    rows: Tensor,
    ids: Tensor,
    tables: Tensor,
    firsts: Tensor,
    num_rows: int,
    place_key: Tensor | None = None,
) -> Tensor:
    """:meth:`SharedRows.rows` of tables whose ``num_rows`` shared rows begin at ``firsts``, int64
    ``[T]``. A ``place_key`` that is on the device spares a copy to it."""
    if place_key is None:
        place_key = torch.tensor(_PLACE_KEY, device=ids.device)
    places = (shift_right(random_bits(place_key, ids), 32) * num_rows) >> 32
    shared = firsts[tables.clamp_min(0)] + places
    return torch.where((rows < 0) & (tables >= 0), shared, rows)
