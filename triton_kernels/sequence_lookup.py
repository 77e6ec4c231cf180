"""The Triton kernel of ``sequence_lookup``.

Byte floor: each id and its row read once, each vector written once,
``L * (id bytes + D * (weight bytes + output bytes))``; rows that repeat within the reach of the
cache cost less.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.triton_kernels.launch_sizes import cdiv
from torchembed.triton_kernels.rounding import round_to_nearest
from torchembed.triton_kernels.row_blocks import (
    NUM_WARPS,
    index_type,
    load_rows,
    row_block,
    store_rows,
)

# Two loads of rows are in flight on each thread; with one, memory waits for threads.
_NUM_ACCESSES = 2


@triton.jit(do_not_specialize=["num_ids"])
def _sequence_lookup_forward_kernel(
    weight_ptr,
    rows_ptr,
    out_ptr,
    num_ids,
    DIM: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INDEX: tl.constexpr,
):
    """``out[p] = weight[rows[p]]``, zeros for row -1.

    Example: ``weight = [[1, 2], [3, 4]]``, ``rows = [1, -1, 0]``:
    ``out = [[3, 4], [0, 0], [1, 2]]``.
    """
    position = tl.program_id(0).to(INDEX) * BLOCK_IDS + tl.arange(0, BLOCK_IDS)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = position < num_ids
    row = tl.load(rows_ptr + position, mask=inside, other=-1)
    # Rows of -1 load nothing and give zeros, so the store needs no case for them.
    vectors = load_rows(weight_ptr, row, row >= 0, columns, DIM, INDEX)
    rounded = round_to_nearest(vectors, out_ptr.dtype.element_ty)
    store_rows(out_ptr, position, inside, columns, rounded, DIM, INDEX)


def launch_sequence_lookup_forward(
    weight: Tensor, rows: Tensor, output_dtype: torch.dtype
) -> Tensor:
    """``torchembed::sequence_lookup_forward``; see
    :func:`torchembed.ops.sequence_lookup.sequence_lookup`."""
    num_ids, dim = rows.numel(), weight.shape[1]
    out = torch.empty(num_ids, dim, dtype=output_dtype, device=weight.device)
    if out.numel() == 0:
        return out
    block = row_block(dim, weight.dtype, output_dtype, num_accesses=_NUM_ACCESSES)
    grid = (cdiv(num_ids, block.rows), cdiv(dim, block.columns))
    with torch.cuda.device_of(weight):
        _sequence_lookup_forward_kernel[grid](
            weight,
            rows,
            out,
            num_ids,
            DIM=dim,
            BLOCK_IDS=block.rows,
            BLOCK_D=block.columns,
            INDEX=index_type(weight, rows, out),
            num_warps=NUM_WARPS,
        )
    return out
