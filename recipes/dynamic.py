"""Tables of a run whose ids are those of the data."""

import enum
import math
from typing import NamedTuple

from torchembed import LFU, LRU, CountMinSketch, Dynamic, HashedRows


class Eviction(enum.Enum):
    """Whose row goes where a dynamic table is full."""

    LRU = "LRU"
    """Evicts the row of the id that no batch has used for longest."""
    LFU = "LFU"
    """Evicts the row of the id that has occurred least often; ids without a row are counted by a
    sketch."""


class TableSize(NamedTuple):
    """The rows of a table."""

    num_embeddings: int
    """Rows, or capacity, as a table's config says."""
    dynamic: Dynamic | None
    """The policies of a dynamic table; None for a static one."""


DEFAULT_EVICTION = Eviction.LFU
DEFAULT_SHARED = 0.5


def check_dynamic(
    *, is_dynamic: bool, capacity: float | None, eviction: Eviction, shared: float
) -> None:
    """Raise unless ``capacity`` is a positive part, or None, and ``shared`` a part below 1, and
    these settings are of dynamic tables that evict where they are given."""
    if capacity is not None and not 0 < capacity < math.inf:
        raise ValueError(f"capacity must be a number above 0, or left out, got {capacity}")
    if not 0 <= shared < 1:
        raise ValueError(f"shared must be at least 0 and less than 1, got {shared}")
    if not is_dynamic and eviction is not DEFAULT_EVICTION:
        raise ValueError(f"eviction must be left out without dynamic, got {eviction.value}")
    if shared != DEFAULT_SHARED and not (is_dynamic and capacity is not None):
        raise ValueError(
            f"shared must be left out without dynamic and capacity, where no id is without a row "
            f"of its own, got {shared}"
        )


def num_rows(capacity: float | None, num_ids: int) -> int:
    """Rows of a table for ``num_ids`` ids: ``capacity`` times as many, or a row for each."""
    return num_ids if capacity is None else max(1, round(capacity * num_ids))


def table_size(
    num_rows: int,
    *,
    is_dynamic: bool,
    evicts: bool,
    eviction: Eviction,
    shared: float,
    has_deltas: bool = False,
) -> TableSize:
    """A table of ``num_rows``.

    Args:
        evicts: whether more ids than rows are expected, so that ids without a row share some.
        shared: the part of the rows that they share.
        has_deltas: whether the ids that leave it are remembered, as many as it has rows.
    """
    if not is_dynamic:
        return TableSize(num_rows, None)
    log = num_rows if has_deltas else 0
    if not evicts:
        return TableSize(num_rows, Dynamic(eviction=_policy(eviction), deletion_log=log))
    if shared and num_rows < _FEW_ROWS:
        num_own, num_shared = 1, num_rows
    else:
        num_shared = min(round(shared * num_rows), num_rows - 1)
        num_own = num_rows - num_shared
    counted = CountMinSketch(threshold=1, width=_COUNTS_PER_ROW * num_rows)
    dynamic = Dynamic(
        eviction=_policy(eviction),
        admission=counted if eviction is Eviction.LFU else None,
        missing=HashedRows(num_shared) if num_shared else "zeros",
        deletion_log=log,
    )
    return TableSize(num_own, dynamic)


# Each batch uses all rows of so small a table, so that none could be evicted for more frequent ids:
# all of them are shared, beside one.
_FEW_ROWS = 128
# Of each of the sketch's four rows: 64 bytes for each row of the table.
_COUNTS_PER_ROW = 4


def _policy(eviction: Eviction) -> LRU | LFU:
    return LRU() if eviction is Eviction.LRU else LFU()
