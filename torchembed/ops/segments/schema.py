"""Defines ``torchembed::find_runs`` and picks its kernels."""

import torch
from torch import Tensor

from torchembed import _native
from torchembed.core.dispatch import define_op
from torchembed.core.types import RUN_CHUNK
from torchembed.ops.segments.checks import (
    check_find_runs,
    check_find_runs_contents,
)
from torchembed.ops.segments.reference import find_runs_reference


def _fake(rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_ids = rows.shape[0]
    return (
        rows.new_empty(num_ids),
        rows.new_empty(num_ids + 1, dtype=torch.int32),
        rows.new_empty(num_ids, dtype=torch.int32),
        rows.new_empty(1, dtype=torch.int32),
        rows.new_empty(num_ids // RUN_CHUNK, dtype=torch.int32),
    )


find_runs_op = define_op(
    "find_runs(Tensor rows, SymInt num_rows) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=find_runs_reference,
    fake=_fake,
    triton="torchembed.triton_kernels.segments:launch_find_runs",
    native=_native.native_op("find_runs"),
    check=check_find_runs,
    check_contents=check_find_runs_contents,
)
