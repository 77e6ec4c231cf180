"""The Triton kernels of ``pooled_lookup``.

Byte floors. Forward: each id and its row read once, each bag's vector written once,
``L * (id bytes + D * weight bytes) + B * F * D * output bytes``. Gradient of per-id
weights: each id's row and gradient row read once.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.core.types import COPY_FIELDS
from torchembed.triton_kernels.bags import bag_bounds, bag_extent, feature_at
from torchembed.triton_kernels.gradient_map import launch_pooled_lookup_gradient_map
from torchembed.triton_kernels.launch_sizes import cdiv
from torchembed.triton_kernels.push import TRITON_DTYPES, pushed_to
from torchembed.triton_kernels.rounding import as_float32, round_to_nearest
from torchembed.triton_kernels.row_blocks import (
    NUM_WARPS,
    RowBlock,
    index_type,
    load_rows,
    row_block,
    store_rows,
)

_COPY_FIELDS = tl.constexpr(COPY_FIELDS)
_UNROLL = 4
# Fewer bags than these do not fill a GPU; each program may then have more registers, and more rows
# in flight.
_FEW_BAGS = 2**15
_UNROLL_OF_FEW = 8
_REGISTERS_OF_FEW = 64
# Rows of more bytes than these, and 16-bit ones, are pooled by one warp each, which waits for no
# other one; where bags have at least so many ids, since each warp takes few bags.
_WIDE_BYTES = 512
_MANY_IDS_OF_BAG = 4


@triton.jit
def _add_rows(
    total,
    weight_ptr,
    rows_ptr,
    per_id_weights_ptr,
    start,
    first,
    length,
    inside,
    columns,
    NUM_STEPS: tl.constexpr,
    DIM: tl.constexpr,
    INDEX: tl.constexpr,
):
    """``total`` plus the rows of NUM_STEPS ids of each bag from its ``first`` on, loaded at once
    and added in the order of the positions."""
    # Unrolled, so that all loads are issued before the first sum waits for one.
    for step in tl.static_range(NUM_STEPS):
        in_bag = inside & (first + step < length)
        position = start + first + step
        row = tl.load(rows_ptr + position, mask=in_bag, other=-1)
        vectors = load_rows(weight_ptr, row, row >= 0, columns, DIM, INDEX)
        if per_id_weights_ptr is not None:
            weights = tl.load(per_id_weights_ptr + position, mask=in_bag, other=0.0)
            vectors *= as_float32(weights)[:, None]
        total += vectors
    return total


@triton.jit(do_not_specialize=["batch_size", "blocks_per_feature"])
def _pooled_lookup_forward_kernel(
    weight_ptr,
    rows_ptr,
    bounds_ptr,
    per_id_weights_ptr,
    out_ptr,
    num_features,
    batch_size,
    blocks_per_feature,
    copies_ptr,
    state_ptr,
    half_elements,
    FIXED: tl.constexpr,
    MEAN: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_BAGS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
    UNROLL_OF_REST: tl.constexpr,
    INDEX: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    PUSHED: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """``out[b, f] = sum over p of bag (f, b) of per_id_weights[p] * weight[rows[p]]``.

    A program takes BLOCK_BAGS bags of a feature, all at once, and goes through them UNROLL ids at a
    time, then UNROLL_OF_REST ids at a time.

    With ``copies``, one of each feature for each of NUM_RANKS ranks, vectors are stored as PUSHED
    where :func:`~torchembed.triton_kernels.push._copy_kernel` would copy them from ``out``.

    Example: D = 1, ``weight = [[10], [20], [30]]``, two features and a batch of 2,
    ``rows = [0, 2, 2, 1, -1]``, ``offsets = [0, 2, 2, 3, 5]``: ``out = [[40, 30], [0, 20]]``; under
    MEAN ``[[20, 30], [0, 10]]``.
    """
    # Programs of one feature come one after the other: rows of its table that repeat are in cache.
    program = tl.program_id(0)
    place = program // blocks_per_feature
    feature = feature_at(bounds_ptr, place // NUM_RANKS, num_features, FIXED)
    sample = (program % blocks_per_feature) * BLOCK_BAGS + tl.arange(0, BLOCK_BAGS)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    if copies_ptr is None:
        inside = sample < batch_size
    else:
        # Samples of this program are those of one rank: counted from 0 in its memory, and from the
        # copy's row in the batch.
        copy = copies_ptr + (feature * NUM_RANKS + place % NUM_RANKS) * _COPY_FIELDS
        out_row = sample
        inside = sample < tl.load(copy + 1)
        sample += tl.load(copy + 3).to(tl.int32)
    start, length = bag_extent(bounds_ptr, feature, sample, batch_size, inside, FIXED, INDEX)
    # The bags of a block are summed in one loop, as long as the longest; masks end shorter ones.
    longest = length if FIXED else tl.max(length, axis=0)
    rest = longest // UNROLL * UNROLL

    total = tl.zeros([BLOCK_BAGS, BLOCK_D], tl.float32)
    for first in range(0, rest, UNROLL):
        total = _add_rows(
            total,
            weight_ptr,
            rows_ptr,
            per_id_weights_ptr,
            start,
            first,
            length,
            inside,
            columns,
            UNROLL,
            DIM,
            INDEX,
        )
    for first in range(rest, longest, UNROLL_OF_REST):
        total = _add_rows(
            total,
            weight_ptr,
            rows_ptr,
            per_id_weights_ptr,
            start,
            first,
            length,
            inside,
            columns,
            UNROLL_OF_REST,
            DIM,
            INDEX,
        )
    if MEAN:
        # A scalar under FIXED; the sum makes it a block. An empty bag divides its zeros by 1.
        count = tl.zeros([BLOCK_BAGS], tl.float32) + tl.maximum(length, 1).to(tl.float32)
        total = tl.div_rn(total, count[:, None])
    if copies_ptr is None:
        out_row = sample.to(INDEX) * num_features + feature
        rounded = round_to_nearest(total, out_ptr.dtype.element_ty)
        store_rows(out_ptr, out_row, inside, columns, rounded, DIM, INDEX)
    else:
        out = pushed_to(out_ptr, tl.load(copy), state_ptr, half_elements, PUSHED)
        out += tl.multiple_of(tl.load(copy + 5), VECTOR)
        stride = tl.multiple_of(tl.load(copy + 6), VECTOR)
        mask = inside[:, None] & (columns < DIM)[None, :]
        rounded = round_to_nearest(total, PUSHED)
        tl.store(out + out_row[:, None] * stride + columns[None, :], rounded, mask=mask)


def launch_pooled_lookup_forward(
    weight: Tensor,
    rows: Tensor,
    offsets: Tensor | None,
    hotness: list[int],
    per_id_weights: Tensor | None,
    num_features: int,
    batch_size: int,
    mean: bool,
    output_dtype: torch.dtype,
) -> Tensor:
    """``torchembed::pooled_lookup_forward``; see
    :func:`torchembed.ops.pooled_lookup.pooled_lookup`."""
    shape = (batch_size, num_features, weight.shape[1])
    out = torch.empty(shape, dtype=output_dtype, device=weight.device)
    if out.numel() > 0:
        bags = offsets, hotness, per_id_weights, num_features, batch_size, mean
        _launch_forward(weight, rows, *bags, out, None)
    return out


def launch_push_pooled_lookup(
    weight: Tensor,
    rows: Tensor,
    offsets: Tensor | None,
    hotness: list[int],
    per_id_weights: Tensor | None,
    num_features: int,
    batch_size: int,
    copies: Tensor,
    max_rows: int,
    max_columns: int,
    vector: int,
    buffers: list[Tensor],
    addresses: Tensor,
    state: Tensor,
) -> None:
    """``torchembed::push_pooled_lookup``; see :func:`torchembed.ops.push.push_pooled_lookup`."""
    bags = offsets, hotness, per_id_weights, num_features, batch_size, False
    pushed = _Pushed(
        copies, max_rows, vector, state, len(buffers), buffers[0].shape[1], buffers[0].dtype
    )
    if num_features * batch_size > 0:
        _launch_forward(weight, rows, *bags, addresses, pushed)


class _Pushed(NamedTuple):
    """Destination of vectors in the buffers of ranks, see ``push_pooled_lookup``."""

    copies: Tensor
    max_rows: int
    vector: int
    state: Tensor
    num_ranks: int
    half_elements: int
    dtype: torch.dtype


class _Sizes(NamedTuple):
    """Sizes of a launch of the forward kernel; they change no bit of what it writes."""

    block: RowBlock
    unroll: int
    unroll_of_rest: int
    num_warps: int
    max_registers: int | None


def _forward_sizes(dim: int, dtype: torch.dtype, num_ids: int, num_bags: int) -> _Sizes:
    """The sizes that were the fastest on an H200, of those that were tried."""
    if num_bags < _FEW_BAGS:
        return _Sizes(row_block(dim, dtype), _UNROLL_OF_FEW, _UNROLL, NUM_WARPS, _REGISTERS_OF_FEW)
    row_bytes = dim * dtype.itemsize
    is_wide = row_bytes > _WIDE_BYTES or dtype.itemsize == 2
    if not is_wide or num_ids < _MANY_IDS_OF_BAG * num_bags:
        return _Sizes(row_block(dim, dtype), _UNROLL, _UNROLL, NUM_WARPS, None)
    # Two accesses of 16 bytes on each of 32 threads, or four.
    num_accesses = 2 if row_bytes <= 1024 else 4
    block = row_block(dim, dtype, num_warps=1, num_accesses=num_accesses)
    return _Sizes(block, _UNROLL, 2, 1, None)


def _launch_forward(
    weight: Tensor,
    rows: Tensor,
    offsets: Tensor | None,
    hotness: list[int],
    per_id_weights: Tensor | None,
    num_features: int,
    batch_size: int,
    mean: bool,
    out: Tensor,
    to: _Pushed | None,
) -> None:
    """Launch the forward kernel; ``out`` is the matrix of results or, with ``to``, the addresses of
    the ranks' buffers."""
    dim = weight.shape[1]
    num_bags = num_features * batch_size
    sizes = _forward_sizes(dim, weight.dtype, rows.numel(), num_bags)
    block, num_ranks = sizes.block, 1 if to is None else to.num_ranks
    blocks_per_feature = cdiv(batch_size if to is None else to.max_rows, block.rows)
    grid = (num_features * num_ranks * blocks_per_feature, cdiv(dim, block.columns))
    with torch.cuda.device_of(weight):
        bounds = bag_bounds(offsets, hotness, weight.device)
        _pooled_lookup_forward_kernel[grid](
            weight,
            rows,
            bounds.tensor,
            per_id_weights,
            out,
            num_features,
            batch_size,
            blocks_per_feature,
            None if to is None else to.copies,
            None if to is None else to.state,
            0 if to is None else to.half_elements,
            FIXED=bounds.fixed,
            MEAN=mean,
            DIM=dim,
            BLOCK_BAGS=block.rows,
            BLOCK_D=block.columns,
            UNROLL=sizes.unroll,
            UNROLL_OF_REST=sizes.unroll_of_rest,
            INDEX=index_type(weight, rows, out),
            NUM_RANKS=num_ranks,
            PUSHED=None if to is None else TRITON_DTYPES[to.dtype],
            VECTOR=1 if to is None else to.vector,
            num_warps=sizes.num_warps,
            maxnreg=sizes.max_registers,
        )


@triton.jit(do_not_specialize=["num_ids"])
def _pooled_lookup_weights_backward_kernel(
    grad_ptr,
    weight_ptr,
    rows_ptr,
    gradient_rows_ptr,
    scales_ptr,
    out_ptr,
    num_ids,
    DIM: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INDEX: tl.constexpr,
):
    """``out[p] = scales[p] * dot(grad[gradient_rows[p]], weight[rows[p]])``, 0 for row -1.

    Example: ``grad = [[1, 2], [3, 4]]``, ``weight = [[5, 6], [7, 8]]``, ``rows = [1, 0, -1]``,
    ``gradient_rows = [0, 1, 1]``: ``out = [23, 39, 0]``.
    """
    position = tl.program_id(0).to(INDEX) * BLOCK_IDS + tl.arange(0, BLOCK_IDS)
    inside = position < num_ids
    row = tl.load(rows_ptr + position, mask=inside, other=-1)
    found = row >= 0
    gradient_row = tl.load(gradient_rows_ptr + position, mask=found, other=0)
    total = tl.zeros([BLOCK_IDS], tl.float32)
    for first_column in range(0, DIM, BLOCK_D):
        columns = first_column + tl.arange(0, BLOCK_D)
        vectors = load_rows(weight_ptr, row, found, columns, DIM, INDEX)
        gradients = load_rows(grad_ptr, gradient_row, found, columns, DIM, INDEX)
        total += tl.sum(gradients * vectors, axis=1)
    if scales_ptr is not None:
        total *= tl.load(scales_ptr + position, mask=found, other=0.0)
    tl.store(out_ptr + position, total, mask=inside)


def launch_pooled_lookup_weights_backward(
    grad: Tensor,
    weight: Tensor,
    rows: Tensor,
    offsets: Tensor | None,
    hotness: list[int],
    mean: bool,
) -> Tensor:
    """``torchembed::pooled_lookup_weights_backward``: the gradient of ``per_id_weights`` of
    :func:`torchembed.ops.pooled_lookup.pooled_lookup`."""
    batch_size, num_features, dim = grad.shape
    num_ids = rows.numel()
    if num_ids == 0 or grad.numel() == 0:
        return torch.zeros(num_ids, dtype=torch.float32, device=rows.device)
    out = torch.empty(num_ids, dtype=torch.float32, device=rows.device)
    gradient_rows, scales = launch_pooled_lookup_gradient_map(
        rows, offsets, hotness, None, num_features, batch_size, mean
    )
    block = row_block(dim, grad.dtype, weight.dtype)
    with torch.cuda.device_of(rows):
        _pooled_lookup_weights_backward_kernel[(cdiv(num_ids, block.rows),)](
            grad,
            weight,
            rows,
            gradient_rows,
            scales if mean else None,
            out,
            num_ids,
            DIM=dim,
            BLOCK_IDS=block.rows,
            BLOCK_D=block.columns,
            INDEX=index_type(grad, weight, rows),
            num_warps=NUM_WARPS,
        )
    return out
