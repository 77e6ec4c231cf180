"""Tables of a run whose ids are those of the data."""

import enum
import math

from torchembed import LFU, LRU, Dynamic


class Eviction(enum.Enum):
    """Whose row goes where a dynamic table is full."""

    LRU = LRU()
    """Evicts the row of the id that no batch has used for longest."""
    LFU = LFU()
    """Evicts the row of the id that has occurred least often."""


def check_capacity(capacity: float | None) -> None:
    """Raise unless ``capacity`` is a positive part, or None."""
    if capacity is not None and not 0 < capacity < math.inf:
        raise ValueError(f"capacity must be a number above 0, or left out, got {capacity}")


def num_rows(capacity: float | None, num_ids: int) -> int:
    """Rows of a table for ``num_ids`` ids: ``capacity`` times as many, or a row for each."""
    return num_ids if capacity is None else max(1, round(capacity * num_ids))


def dynamic_of(is_dynamic: bool, eviction: Eviction) -> Dynamic | None:
    """The ``dynamic`` of the configs of a run's tables."""
    return Dynamic(eviction=eviction.value) if is_dynamic else None
