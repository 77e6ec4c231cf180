"""The rows of a batch that were to be brought into a cache."""

from typing import NamedTuple

from torch import Tensor


class FetchedRows(NamedTuple):
    """The rows of a batch that were to be brought into a cache."""

    unique_rows: Tensor
    """``[L]``: the distinct rows, increasing; -1 from ``num_rows`` on."""
    num_rows: Tensor
    """int32 ``[1]``."""
    num_refused: Tensor
    """int64 ``[1]``: slots that the cache had too few; the rows that it did not hold before are not
    in it then."""
    epoch: Tensor
    """int64 ``[1]``: of the batch, as the cache counts."""
    num_emptied: Tensor
    """int64 ``[1]``: how often the cache had been emptied by then."""
    num_short: Tensor | None = None
    """int64 ``[1]``: places that the memory of the host had too few, of tables on disk."""
    may_be_late: Tensor | None = None
    """bool ``[1]``: False where the rows are not brought in at all, since the batch is not trained,
    or, of tables on disk, host memory does not hold them. None for a batch that is trained."""
