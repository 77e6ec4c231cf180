"""The specification of ``find_runs`` in eager torch."""

import torch
from torch import Tensor


def find_runs_reference(rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_ids = rows.numel()
    sorted_rows, order = torch.sort(rows, stable=True)
    valid = sorted_rows >= 0
    first = valid.clone()
    first[1:] &= sorted_rows[1:] != sorted_rows[:-1]
    run = torch.cumsum(first, 0) - 1  # the run of each sorted position; -1 before the first run
    # Positions that start no run write to slot L, which is cut off: shapes stay static.
    slot = torch.where(first, run, num_ids)
    unique_rows = rows.new_full((num_ids + 1,), -1).scatter_(0, slot, sorted_rows)
    starts = torch.full((num_ids + 1,), num_ids, dtype=torch.int32, device=rows.device)
    positions = torch.arange(num_ids, dtype=torch.int32, device=rows.device)
    starts.scatter_(0, slot, torch.where(first, positions, num_ids))
    num_runs = first.sum(dtype=torch.int32).reshape(1)
    return unique_rows[:num_ids], starts, order.to(torch.int32), num_runs
