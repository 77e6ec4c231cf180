"""The Triton kernel of ``linearize_ids``.

Byte floor: each id read once and each row written once, ``L * (id bytes + row bytes)``; the bounds
and the tables' sizes stay in cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.core.types import OnBadId
from torchembed.triton_kernels.bags import bag_bounds
from torchembed.triton_kernels.launch_sizes import cdiv
from torchembed.triton_kernels.row_blocks import index_type
from torchembed.triton_kernels.searching import count_not_above_each, most_entries

_BLOCK = 1024


@triton.jit(do_not_specialize=["num_ids", "bounds_stride", "bounds_scale"])
def _linearize_ids_kernel(
    values_ptr,
    bounds_ptr,
    first_rows_ptr,
    num_rows_ptr,
    rows_ptr,
    first_bad_ptr,
    num_ids,
    num_features,
    bounds_stride,
    bounds_scale,
    CLAMP: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST_FEATURES: tl.constexpr,
    INDEX: tl.constexpr,
):
    """``rows[p] = first_rows[f] + values[p]`` for position p of feature f; -1 for a bad id and for
    one that belongs to no bag.

    Example: two features with tables of 3 and 4 rows, ``first_rows = [0, 3]``, batch size 2,
    hotness (1, 2): ``values = [2, 0, 1, 3, 4, 0]`` gives ``rows = [2, 0, 4, 6, -1, 3]`` and
    ``first_bad = 4``; with CLAMP, ``rows[4] = 6``.
    """
    first = tl.program_id(0).to(INDEX) * BLOCK
    position = first + tl.arange(0, BLOCK)
    inside = position < num_ids
    # Loaded first, so that the search and the ids are waited for at once.
    value = tl.load(values_ptr + position, mask=inside, other=0).to(tl.int64)
    # One search for most blocks, since few blocks hold the end of a feature.
    ends_ptr = bounds_ptr + bounds_stride
    feature = count_not_above_each(
        ends_ptr, num_features, first, bounds_stride, bounds_scale, BLOCK, MOST_FEATURES
    )
    in_bag = inside & (feature < num_features)
    first_row = tl.load(first_rows_ptr + feature, mask=in_bag, other=0)
    limit = tl.load(num_rows_ptr + feature, mask=in_bag, other=0)

    bad = in_bag & ((value < 0) | (value >= limit))
    if CLAMP:
        # A table without rows has no nearest id, so its ids become row -1.
        nearest = tl.minimum(tl.maximum(value, 0), limit - 1)
        row = tl.where(limit > 0, first_row + nearest, -1)
    else:
        row = tl.where(in_bag & (bad == 0), first_row + value, -1)
    tl.store(rows_ptr + position, row.to(rows_ptr.dtype.element_ty), mask=inside)

    # A minimum, so that the result does not depend on the order of programs; only a program with a
    # bad id pays for the atomic.
    first_bad = tl.min(tl.where(bad, position, num_ids).to(tl.int64), axis=0)
    if first_bad < num_ids:
        tl.atomic_min(first_bad_ptr, first_bad, sem="relaxed")


def launch_linearize_ids(
    values: Tensor,
    offsets: Tensor | None,
    hotness: list[int],
    first_rows: Tensor,
    num_rows: Tensor,
    batch_size: int,
    on_bad_id: int,
    rows_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """``torchembed::linearize_ids``; see :func:`torchembed.ops.linearize_ids.linearize_ids`."""
    num_ids, num_features = values.numel(), first_rows.numel()
    rows = torch.empty(num_ids, dtype=rows_dtype, device=values.device)
    first_bad = torch.full((1,), num_ids, dtype=torch.int64, device=values.device)
    if num_ids == 0:
        return rows, first_bad
    with torch.cuda.device_of(values):
        bounds = bag_bounds(offsets, hotness, values.device)
        stride, scale = bounds.feature_steps(batch_size)
        _linearize_ids_kernel[(cdiv(num_ids, _BLOCK),)](
            values,
            bounds.tensor,
            first_rows.contiguous(),
            num_rows.contiguous(),
            rows,
            first_bad,
            num_ids,
            num_features,
            stride,
            scale,
            CLAMP=on_bad_id == OnBadId.CLAMP,
            BLOCK=_BLOCK,
            MOST_FEATURES=most_entries(num_features),
            INDEX=index_type(values),
        )
    return rows, first_bad


@triton.jit(do_not_specialize=["num_ids", "bounds_stride"])
def _locate_bad_id_kernel(
    values_ptr,
    first_bad_ptr,
    bounds_ptr,
    location_ptr,
    num_ids,
    num_features,
    bounds_stride,
    MOST_FEATURES: tl.constexpr,
):
    """``location = position, values[position], f, bounds[f]`` of the bad id, which is of feature f;
    only the first two where there are no bounds.

    Example: ``values = [7, 1, 9]``, ``first_bad = [2]``, ``bounds = [0, 1, 3]`` give 2 9 1 1.
    """
    position = tl.load(first_bad_ptr)
    value = tl.load(values_ptr + tl.minimum(position, num_ids - 1)).to(tl.int64)
    tl.store(location_ptr, position)
    tl.store(location_ptr + 1, value)
    if bounds_ptr is not None:
        feature = count_not_above_each(
            bounds_ptr + bounds_stride, num_features, position, bounds_stride, 1, 1, MOST_FEATURES
        )
        first = tl.load(bounds_ptr + feature * bounds_stride).to(tl.int64)
        tl.store(location_ptr + 2 + tl.arange(0, 1), feature)
        tl.store(location_ptr + 3 + tl.arange(0, 1), first)


def launch_locate_bad_id(
    values: Tensor, first_bad: Tensor, bounds: Tensor | None, location: Tensor
) -> None:
    """``torchembed::locate_bad_id``; see :func:`torchembed.ops.linearize_ids.locate_bad_id`."""
    num_features = 0 if bounds is None else bounds.numel() - 1
    with torch.cuda.device_of(values):
        _locate_bad_id_kernel[(1,)](
            values,
            first_bad,
            bounds,
            location,
            values.numel(),
            num_features,
            1 if bounds is None else bounds.stride(0),
            MOST_FEATURES=most_entries(num_features),
            num_warps=1,
        )
