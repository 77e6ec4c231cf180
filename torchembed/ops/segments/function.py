"""The public function ``find_runs``."""

from typing import NamedTuple

from torch import Tensor

from torchembed.ops.segments.schema import find_runs_op


class Runs(NamedTuple):
    """The distinct rows of a batch and where each occurs. Capacity L, the number of ids.

    Run ``u < num_runs`` is row ``unique_rows[u]``; it occurs at the positions
    ``order[starts[u]:starts[u + 1]]``, in increasing order.
    """

    unique_rows: Tensor
    """``[L]``, dtype of ``rows``: increasing, -1 from ``num_runs`` on."""
    starts: Tensor
    """``[L + 1]``, int32: L from ``num_runs`` on, so that later runs are empty."""
    order: Tensor
    """``[L]``, int32: the stable sorting permutation; positions of row -1 come first."""
    num_runs: Tensor
    """``[1]``, int32."""
    chunk_runs: Tensor
    """``[L // 32]``, int32: the run of the whole chunk that starts in each window of 32 sorted
    positions, -1 where none does.

    A chunk of run u is 32 sorted positions from ``starts[u] + 32 * k`` on that lie wholly in the
    run; updates sum chunks in parallel. A chunk that starts in a window holds the window's last
    position, so a window has one at most. Example: of runs with 3, 60 and 2 positions, the second
    has the chunk ``[3, 35)``, which starts in window 0, and ``chunk_runs = [1, -1]``.
    """


def find_runs(rows: Tensor, num_rows: int) -> Runs:
    """Sort a batch's rows and find the runs of equal ones. Rows of -1 belong to no run.

    Deterministic; never synchronizes, since every shape follows from L.

    Worked example: ``rows = [5, 2, -1, 5]`` gives ``order = [2, 1, 0, 3]``,
    ``unique_rows = [2, 5, -1, -1]``, ``starts = [1, 2, 4, 4, 4]``, ``num_runs = [2]``,
    ``chunk_runs = []``.

    Args:
        rows: ``[L]``, int32 or int64, each -1 or in ``[0, num_rows)``; L < 2**31.
        num_rows: rows of the table group; bounds the bits that are sorted.

    Raises:
        TypeError, ValueError: for a dtype or shape that does not fit, or 2**31 ids or more.
    """
    return Runs(*find_runs_op(rows.contiguous(), num_rows))
