"""The Triton kernel of ``find_cached``.

Byte floor for each id: its bytes read and written, and a sector of 32 bytes of the slots' numbers
for each distinct row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.triton_kernels.launch_sizes import cdiv

_BLOCK = 1024


@triton.jit(do_not_specialize=["num_ids"])
def _find_cached_kernel(slot_of_row_ptr, rows_ptr, slots_ptr, num_ids, BLOCK: tl.constexpr):
    """``slots[p] = slot_of_row[rows[p]]``, -1 for row -1.

    Example: ``slot_of_row = [-1, 4, 0]``, ``rows = [2, -1, 0, 1]``: ``slots = [0, -1, -1, 4]``.
    """
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < num_ids
    row = tl.load(rows_ptr + position, mask=inside, other=-1)
    slot = tl.load(slot_of_row_ptr + row, mask=row >= 0, other=-1)
    tl.store(slots_ptr + position, slot.to(slots_ptr.dtype.element_ty), mask=inside)


def launch_find_cached(slot_of_row: Tensor, rows: Tensor) -> Tensor:
    """``torchembed::find_cached``; see :func:`torchembed.ops.row_cache.find_cached`."""
    slots = torch.empty_like(rows)
    num_ids = rows.numel()
    if num_ids == 0:
        return slots
    with torch.cuda.device_of(rows):
        _find_cached_kernel[(cdiv(num_ids, _BLOCK),)](
            slot_of_row, rows, slots, num_ids, BLOCK=_BLOCK
        )
    return slots
