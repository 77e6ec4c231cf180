"""The Triton kernel of ``find_cached``.

Byte floor for each id: its bytes read and written, and a sector of 32 bytes of the slots' numbers
for each distinct row. Of ids that are not looked at only the bytes of the result are written.
"""

# Kernels take plain numbers as tl.constexpr, which type checkers do not know.
# pyright: reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.triton_kernels.launch_sizes import cdiv

_BLOCK = 1024


@triton.jit(do_not_specialize=["num_ids", "no_slot"])
def _find_cached_kernel(
    slot_of_row_ptr, rows_ptr, num_rows_ptr, slots_ptr, num_ids, no_slot, BLOCK: tl.constexpr
):
    """``slots[p] = slot_of_row[rows[p]]``, ``no_slot`` where that is -1, for row -1, and for p from
    ``num_rows`` on.

    Example: ``slot_of_row = [-1, 4, 0]``, ``rows = [2, -1, 0, 1]``, ``no_slot = 9``:
    ``slots = [0, 9, 9, 4]``; with ``num_rows = 3`` the last one is 9.
    """
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < num_ids
    is_looked_at = inside
    if num_rows_ptr is not None:
        is_looked_at = inside & (position < tl.load(num_rows_ptr))
    row = tl.load(rows_ptr + position, mask=is_looked_at, other=-1)
    slot = tl.load(slot_of_row_ptr + row, mask=row >= 0, other=-1)
    element = slots_ptr.dtype.element_ty
    slot = tl.where(slot >= 0, slot.to(element), tl.zeros_like(row) + no_slot.to(element))
    tl.store(slots_ptr + position, slot, mask=inside)


def launch_find_cached(
    slot_of_row: Tensor, rows: Tensor, num_rows: Tensor | None, no_slot: int
) -> Tensor:
    """``torchembed::find_cached``; see :func:`torchembed.ops.row_cache.find_cached`."""
    slots = torch.empty_like(rows)
    num_ids = rows.numel()
    if num_ids == 0:
        return slots
    with torch.cuda.device_of(rows):
        _find_cached_kernel[(cdiv(num_ids, _BLOCK),)](
            slot_of_row, rows, num_rows, slots, num_ids, no_slot, BLOCK=_BLOCK
        )
    return slots
