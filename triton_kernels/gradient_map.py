"""The Triton kernels of ``pooled_lookup_gradient_map``.

Byte floor: 4 bytes written for each id, and 4 for its scale.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.triton_kernels.bags import bag_bounds
from torchembed.triton_kernels.launch_sizes import cdiv
from torchembed.triton_kernels.rounding import as_float32
from torchembed.triton_kernels.row_blocks import index_type
from torchembed.triton_kernels.searching import count_not_above_each, most_entries

_BLOCK = 1024
# Bags, and ids of each at a time, of a program for jagged bags.
_BLOCK_BAGS, _BLOCK_IDS = 64, 16


@triton.jit
def _store_scales(
    scales_ptr, per_id_weights_ptr, position, length, mask, MEAN: tl.constexpr, SHAPE: tl.constexpr
):
    """Write what scales the gradient at each ``position``, of a bag of ``length`` ids."""
    scale = tl.full(SHAPE, 1.0, tl.float32)
    if per_id_weights_ptr is not None:
        scale = as_float32(tl.load(per_id_weights_ptr + position, mask=mask, other=0.0))
    if MEAN:
        scale = tl.div_rn(scale, length.to(tl.float32))
    tl.store(scales_ptr + position, scale, mask=mask)


@triton.jit(do_not_specialize=["num_ids", "batch_size"])
def _pooled_lookup_fixed_gradient_map_kernel(
    bounds_ptr,
    per_id_weights_ptr,
    gradient_rows_ptr,
    scales_ptr,
    num_ids,
    num_features,
    batch_size,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST_FEATURES: tl.constexpr,
    INDEX: tl.constexpr,
):
    """``gradient_rows[p] = b * F + f`` for position p of bag (f, b), and what scales its gradient,
    where each feature has a fixed hotness.

    Example: features of hotness 2 and 1 and a batch of 2: ``gradient_rows`` are 0 0 2 2 1 3; under
    MEAN ``scales`` are 1/2 1/2 1/2 1/2 1 1.
    """
    first_position = tl.program_id(0).to(INDEX) * BLOCK
    position = first_position + tl.arange(0, BLOCK)
    inside = position < num_ids
    feature = count_not_above_each(
        bounds_ptr + 1, num_features, first_position, 1, batch_size, BLOCK, MOST_FEATURES
    )
    in_bag = feature < num_features
    first = tl.load(bounds_ptr + feature, mask=in_bag, other=0).to(INDEX)
    length = tl.load(bounds_ptr + feature + 1, mask=in_bag, other=1).to(INDEX) - first
    sample = (position - first * batch_size) // length
    gradient_row = tl.where(in_bag, sample * num_features + feature, 0).to(tl.int32)
    tl.store(gradient_rows_ptr + position, gradient_row, mask=inside)
    if scales_ptr is not None:
        _store_scales(scales_ptr, per_id_weights_ptr, position, length, inside, MEAN, [BLOCK])


@triton.jit(do_not_specialize=["num_ids", "num_bags", "batch_size", "num_bag_programs"])
def _pooled_lookup_jagged_gradient_map_kernel(
    bounds_ptr,
    per_id_weights_ptr,
    gradient_rows_ptr,
    scales_ptr,
    num_ids,
    num_bags,
    num_features,
    batch_size,
    num_bag_programs,
    MEAN: tl.constexpr,
    BLOCK_BAGS: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
    INDEX: tl.constexpr,
):
    """The same for jagged bags. A position of no bag has gradient row 0, whose use is masked by its
    row of -1.

    A bag writes its positions, BLOCK_IDS at a time: to search the bounds for each position takes
    longer. The programs after those of bags take the positions behind the last bag.

    Example: two features and a batch of 2, ``offsets = [0, 2, 2, 3, 5]``: ``gradient_rows`` are
    0 0 1 3 3; under MEAN ``scales`` are 1/2 1/2 1 1/2 1/2.
    """
    program = tl.program_id(0)
    if program < num_bag_programs:
        bag = program * BLOCK_BAGS + tl.arange(0, BLOCK_BAGS)
        is_bag = bag < num_bags
        start = tl.load(bounds_ptr + bag, mask=is_bag, other=0).to(INDEX)
        end = tl.load(bounds_ptr + bag + 1, mask=is_bag, other=0).to(INDEX)
        gradient_row = (bag % batch_size * num_features + bag // batch_size).to(tl.int32)
        lengths = (end - start)[:, None]
        rows = tl.zeros([BLOCK_BAGS, BLOCK_IDS], tl.int32) + gradient_row[:, None]
        for first in range(0, tl.max(end - start, axis=0), BLOCK_IDS):
            of_bag = first + tl.arange(0, BLOCK_IDS)[None, :]
            positions = start[:, None] + of_bag
            in_bag = (of_bag < lengths) & (positions < num_ids)
            tl.store(gradient_rows_ptr + positions, rows, mask=in_bag)
            if scales_ptr is not None:
                _store_scales(
                    scales_ptr,
                    per_id_weights_ptr,
                    positions,
                    lengths,
                    in_bag,
                    MEAN,
                    [BLOCK_BAGS, BLOCK_IDS],
                )
    else:
        BLOCK: tl.constexpr = BLOCK_BAGS * BLOCK_IDS
        position = (program - num_bag_programs).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
        behind = (position >= tl.load(bounds_ptr + num_bags)) & (position < num_ids)
        tl.store(gradient_rows_ptr + position, tl.zeros([BLOCK], tl.int32), mask=behind)
        if scales_ptr is not None:
            length = tl.full([BLOCK], 1, tl.int32)
            _store_scales(scales_ptr, per_id_weights_ptr, position, length, behind, MEAN, [BLOCK])


def launch_pooled_lookup_gradient_map(
    ids_like: Tensor,
    offsets: Tensor | None,
    hotness: list[int],
    per_id_weights: Tensor | None,
    num_features: int,
    batch_size: int,
    mean: bool,
) -> tuple[Tensor, Tensor]:
    """``torchembed::pooled_lookup_gradient_map``: what backward of
    :func:`torchembed.ops.pooled_lookup.pooled_lookup` needs to know of each position."""
    num_ids, device = ids_like.numel(), ids_like.device
    has_scales = mean or per_id_weights is not None
    gradient_rows = torch.empty(num_ids, dtype=torch.int32, device=device)
    scales = torch.empty(num_ids if has_scales else 0, dtype=torch.float32, device=device)
    if num_ids == 0:
        return gradient_rows, scales
    outputs = gradient_rows, scales if has_scales else None
    with torch.cuda.device_of(ids_like):
        if offsets is None:
            _pooled_lookup_fixed_gradient_map_kernel[(cdiv(num_ids, _BLOCK),)](
                bag_bounds(None, hotness, device).tensor,
                per_id_weights,
                *outputs,
                num_ids,
                num_features,
                batch_size,
                MEAN=mean,
                BLOCK=_BLOCK,
                MOST_FEATURES=most_entries(num_features),
                INDEX=index_type(ids_like),
            )
        else:
            num_bags = num_features * batch_size
            num_bag_programs = cdiv(num_bags, _BLOCK_BAGS)
            num_programs = num_bag_programs + cdiv(num_ids, _BLOCK_BAGS * _BLOCK_IDS)
            _pooled_lookup_jagged_gradient_map_kernel[(num_programs,)](
                offsets,
                per_id_weights,
                *outputs,
                num_ids,
                num_bags,
                num_features,
                batch_size,
                num_bag_programs,
                MEAN=mean,
                BLOCK_BAGS=_BLOCK_BAGS,
                BLOCK_IDS=_BLOCK_IDS,
                INDEX=index_type(ids_like),
            )
    return gradient_rows, scales
