"""The least that an update of rows takes: each row and its state read and written, nothing else."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16
"""Rows of a program: four in flight for each of its warps."""


@triton.jit
def _touch_rows_kernel(
    weight_ptr,
    state_ptr,
    rows_ptr,
    num_rows,
    DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Reads the rows and their states, and writes them as they are."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (at < num_rows)[:, None]
    row = tl.load(rows_ptr + at, mask=at < num_rows, other=0).to(tl.int64)[:, None]
    weight = weight_ptr + row * DIM + tl.arange(0, DIM)[None, :]
    state = state_ptr + row * STATE_DIM + tl.arange(0, STATE_DIM)[None, :]
    old, old_state = tl.load(weight, mask=inside), tl.load(state, mask=inside)
    tl.store(weight, old, mask=inside)
    tl.store(state, old_state, mask=inside)


def touch_rows(weight: Tensor, state: Tensor, rows: Tensor) -> None:
    """Read and write ``rows [n]``, each once, of ``weight [R, D]`` and ``state``, ``[R, D]`` or
    ``[R]``; D is a power of two."""
    num_rows, dim = rows.numel(), weight.shape[1]
    with torch.cuda.device_of(weight):
        launch: Any = _touch_rows_kernel[(triton.cdiv(num_rows, _ROWS),)]
        launch(
            weight,
            state,
            rows,
            num_rows,
            DIM=dim,
            STATE_DIM=dim if state.dim() == 2 else 1,
            ROWS=_ROWS,
        )
