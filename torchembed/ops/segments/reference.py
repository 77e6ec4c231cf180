"""The specification of ``find_runs`` in eager torch."""

import torch
from torch import Tensor

from torchembed.core.types import RUN_CHUNK


def find_runs_reference(
    rows: Tensor, num_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_ids = rows.numel()
    sorted_rows, order = torch.sort(rows, stable=True)
    valid = sorted_rows >= 0
    first = valid.clone()
    first[1:] &= sorted_rows[1:] != sorted_rows[:-1]
    run = torch.cumsum(first, 0) - 1  # the run of each sorted position; -1 before the first run
    # Positions that start no run write to entry L, which is cut off: shapes stay static.
    entry = torch.where(first, run, num_ids)
    unique_rows = rows.new_full((num_ids + 1,), -1).scatter_(0, entry, sorted_rows)
    starts = torch.full((num_ids + 1,), num_ids, dtype=torch.int32, device=rows.device)
    positions = torch.arange(num_ids, dtype=torch.int32, device=rows.device)
    starts.scatter_(0, entry, torch.where(first, positions, num_ids))
    num_runs = first.sum(dtype=torch.int32).reshape(1)
    chunk_runs = _chunk_runs(starts, run.to(torch.int32))
    return unique_rows[:num_ids], starts, order.to(torch.int32), num_runs, chunk_runs


def _chunk_runs(starts: Tensor, run: Tensor) -> Tensor:
    """``chunk_runs`` from the starts of runs and the ``run`` of each sorted position.

    A chunk holds the last position of the window of 32 positions in which it starts.
    """
    window = torch.arange(run.numel() // RUN_CHUNK, device=run.device)
    last = window * RUN_CHUNK + RUN_CHUNK - 1
    found = run[last]
    start = starts[found.clamp_min(0)]
    chunk_start = last - (last - start) % RUN_CHUNK
    is_whole = (found >= 0) & (chunk_start + RUN_CHUNK <= starts[found + 1])
    return found.where(is_whole, -1)
