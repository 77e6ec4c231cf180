"""Requirements of ``torchembed::find_runs`` on its arguments."""

from torch import Tensor

from torchembed.core import checks, contents

_MAX_IDS = 2**31
"""Positions are int32."""


def check_find_runs(rows: Tensor, num_rows: int) -> None:
    checks.check_ids("rows", rows)
    checks.check_contiguous("rows", rows)
    if checks.reaches(rows.numel(), _MAX_IDS):
        raise ValueError(
            f"rows must hold fewer than 2**31 ids, got {rows.numel()}; split the batch"
        )
    checks.check_not_negative("num_rows", num_rows)


def check_find_runs_contents(rows: Tensor, num_rows: int) -> None:
    contents.check_rows(rows, num_rows)
