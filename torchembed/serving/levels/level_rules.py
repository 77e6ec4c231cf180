"""Rules of a level: what it takes, and which part of a table it is given as that is loaded."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple


class LoadedPart(NamedTuple):
    """Rows of a table that is being loaded."""

    begin: int
    """The place of the first of them among all rows of the table."""
    num_rows: int
    """Rows of the whole table."""


@dataclass(frozen=True, kw_only=True)
class LevelRules:
    """The rules of a level above the lowest one.

    Raises:
        ValueError: for values that cannot be.
    """

    initial_share: float = 1.0
    """The part of each table, from 0 to 1, that is written to the level as the table is loaded: its
    first rows. The other rows are deleted from it."""
    is_own: bool = False
    """True where nobody but this process writes to the level, and it begins empty. Another one is
    left as it is where ``initial_share`` is 0: it has rows from elsewhere."""
    inserts_missed_rows: bool = True
    """True where rows that only a lower level had are written to it as they are read."""
    max_batch_rows: int | None = None
    """Rows of one write; None for as many as come."""

    def __post_init__(self) -> None:
        if not 0 <= self.initial_share <= 1:
            raise ValueError(f"initial_share must be from 0 to 1, got {self.initial_share}")
        if self.max_batch_rows is not None and self.max_batch_rows < 1:
            raise ValueError(f"max_batch_rows must be at least 1, got {self.max_batch_rows}")

    def num_taken(self, part: LoadedPart, num_rows: int) -> int:
        """How many of the ``num_rows`` first rows of a part belong to the initial share."""
        # 100 * 0.29 is less than 29 in floating point.
        end = math.floor(part.num_rows * Fraction(repr(float(self.initial_share))))
        return min(max(end - part.begin, 0), num_rows)
