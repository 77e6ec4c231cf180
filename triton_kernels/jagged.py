"""Triton kernels of the ``jagged`` operations."""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.triton_kernels.rounding import as_float32, round_to_nearest
from torchembed.triton_kernels.searching import count_not_above

_BLOCK_IDS = 512


@triton.jit
def _sum_features_kernel(
    values_ptr,
    source_offsets_ptr,
    ranges_ptr,
    sources_ptr,
    out_ptr,
    out_offsets_ptr,
    num_sources,
    num_values,
    num_features,
    batch_size,
    FLOATING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Values of feature f: the sums over the features ``sources[ranges[f]:ranges[f + 1]]``.

    Forward each feature has one source, which is copied; backward those it was copied to.

    With ``values = [7, 8, 9]``, of which feature 0 has one and feature 1 has two, and one source
    each, 1 and 0: out is ``[8, 9, 7]``.
    """
    positions = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = positions < num_values
    feature = count_not_above(out_offsets_ptr + batch_size, num_features, positions, batch_size, 1)
    inside = mask & (feature < num_features)
    # Bags of a feature lie one after the other in both, so positions within a feature are the same.
    within = positions - tl.load(out_offsets_ptr + feature * batch_size, mask=inside, other=0)
    first = tl.load(ranges_ptr + feature, mask=inside, other=0)
    counts = tl.load(ranges_ptr + feature + 1, mask=inside, other=0) - first
    total = tl.zeros((BLOCK,), dtype=tl.float32 if FLOATING else tl.int64)
    # As many rounds as the feature with the most sources in this block needs.
    for number in range(tl.max(counts, axis=0)):
        present = number < counts
        source = tl.load(sources_ptr + first + number, mask=present, other=0)
        start = tl.load(source_offsets_ptr + source * batch_size, mask=present, other=0)
        # Too small a capacity dropped the last ids: they have no gradient to read.
        kept = present & (start + within < num_sources)
        value = tl.load(values_ptr + start + within, mask=kept, other=0)
        total += as_float32(value) if FLOATING else value.to(tl.int64)
    if FLOATING:
        total = round_to_nearest(total, out_ptr.dtype.element_ty)
    tl.store(out_ptr + positions, total.to(out_ptr.dtype.element_ty), mask=mask)


# Specialized to one bucket, as a constant, Triton 3.6 fails to compile it.
@triton.jit(do_not_specialize=["num_buckets"])
def _bucketize_rows_count_kernel(
    values_ptr,
    offsets_ptr,
    boundaries_ptr,
    buckets_ptr,
    local_ptr,
    lengths_ptr,
    tile_counts_ptr,
    num_ids,
    num_bags,
    batch_size,
    num_buckets,
    BLOCK: tl.constexpr,
):
    """The bucket of each id, its id there, and how many there are for each bag and each tile.

    With boundaries 0, 4, 8 the ids 5, 0, 9 are in buckets 1, 0, 0, as 1, 0, -1. Ids that no bag
    holds are in a bucket of their own, the last.
    """
    positions = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = positions < num_ids
    bags = count_not_above(offsets_ptr + 1, num_bags, positions, 1, 1)
    in_bag = mask & (bags < num_bags)
    ids = tl.load(values_ptr + positions, mask=mask, other=0).to(tl.int64)
    features = tl.where(in_bag, bags // batch_size, 0)
    ranges_ptr = boundaries_ptr + features * (num_buckets + 1)
    buckets = count_not_above(ranges_ptr + 1, num_buckets - 1, ids, 1, 1)
    first = tl.load(ranges_ptr + buckets)
    inside = in_bag & (ids >= first) & (ids < tl.load(ranges_ptr + num_buckets))
    local = tl.where(inside, ids - first, -1)
    # Ids in no range go to the first bucket that has one, so that none is lost.
    fallback = count_not_above(ranges_ptr + 1, num_buckets - 1, tl.load(ranges_ptr), 1, 1)
    buckets = tl.where(inside, buckets, fallback)
    # Integer sums: the same in whatever order the programs come.
    tl.atomic_add(lengths_ptr + buckets * num_bags + bags, 1, mask=in_bag, sem="relaxed")
    buckets = tl.where(in_bag, buckets, num_buckets).to(tl.int32)
    tl.store(buckets_ptr + positions, buckets, mask=mask)
    tl.store(local_ptr + positions, local.to(local_ptr.dtype.element_ty), mask=mask)
    # Counts for each tile, bucket-major: their running sum is where each tile's ids of a bucket
    # begin, which makes the second kernel a stable counting sort without atomics.
    num_tiles = tl.num_programs(0)
    for bucket in range(num_buckets + 1):
        count = tl.sum((mask & (buckets == bucket)).to(tl.int32), axis=0)
        tl.store(tile_counts_ptr + bucket * num_tiles + tl.program_id(0), count)


@triton.jit
def _bucketize_rows_place_kernel(
    buckets_ptr,
    local_ptr,
    weights_ptr,
    tile_starts_ptr,
    new_values_ptr,
    new_weights_ptr,
    positions_ptr,
    num_ids,
    num_buckets,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Put each id behind the earlier ones of its bucket: buckets 1, 0, 0 go to places 2, 0, 1."""
    positions = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = positions < num_ids
    buckets = tl.load(buckets_ptr + positions, mask=mask, other=-1)
    num_tiles = tl.num_programs(0)
    places = tl.zeros((BLOCK,), dtype=tl.int32)
    for bucket in range(num_buckets + 1):
        # The running count within the tile keeps ids of a bucket in their order.
        here = buckets == bucket
        start = tl.load(tile_starts_ptr + bucket * num_tiles + tl.program_id(0))
        places = tl.where(here, start + tl.cumsum(here.to(tl.int32), axis=0) - 1, places)
    tl.store(positions_ptr + positions, places, mask=mask)
    local = tl.load(local_ptr + positions, mask=mask, other=0)
    tl.store(new_values_ptr + places, local, mask=mask)
    if HAS_WEIGHTS:
        weights = tl.load(weights_ptr + positions, mask=mask, other=0.0)
        tl.store(new_weights_ptr + places, weights, mask=mask)


class _Arrangement(NamedTuple):
    """Index tensors of a permutation of ``F`` features, on a device."""

    features: Tensor
    """``[K]``: the permutation."""
    identity: Tensor
    """``[K + 1]``: 0, 1, 2 and so on, ranges of one."""
    places: Tensor
    """``[K]``: positions of the permutation sorted by the feature there."""
    ranges: Tensor
    """``[F + 1]``: feature f is at the positions ``places[ranges[f]:ranges[f + 1]]``."""


@functools.cache
def _arrangement(
    permutation: tuple[int, ...], num_features: int, device: torch.device
) -> _Arrangement:
    """The index tensors of ``permutation``, made once and kept: a copy to a device makes the host
    wait, and captured graphs read them."""
    features = torch.tensor(permutation, dtype=torch.int64)
    counts = torch.bincount(features, minlength=num_features)
    return _Arrangement(
        features.to(device),
        torch.arange(len(permutation) + 1, device=device),
        torch.sort(features, stable=True).indices.to(device),
        torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(device),
    )


def _offsets_of(lengths: Tensor, dtype: torch.dtype) -> Tensor:
    """Offsets of bags of the given ``lengths [n]``: their running sum from 0, ``[n + 1]``."""
    offsets = torch.zeros(lengths.numel() + 1, device=lengths.device, dtype=dtype)
    torch.cumsum(lengths, 0, dtype=dtype, out=offsets[1:])
    return offsets


def _sum_features(
    values: Tensor,
    source_offsets: Tensor,
    ranges: Tensor,
    sources: Tensor,
    out_offsets: Tensor,
    batch_size: int,
    num_values: int,
) -> Tensor:
    out = values.new_empty(num_values)
    if num_values:
        with torch.cuda.device_of(values):
            _sum_features_kernel[(triton.cdiv(num_values, _BLOCK_IDS),)](
                values,
                source_offsets,
                ranges,
                sources,
                out,
                out_offsets,
                values.numel(),
                num_values,
                ranges.numel() - 1,
                batch_size,
                FLOATING=values.is_floating_point(),
                BLOCK=_BLOCK_IDS,
            )
    return out


def launch_permute_features_forward(
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    permutation: list[int],
    num_features: int,
    batch_size: int,
    num_ids: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """``torchembed::permute_features_forward``; see
    :func:`torchembed.ops.jagged.permute_features`."""
    arrangement = _arrangement(tuple(permutation), num_features, values.device)
    samples = torch.arange(batch_size, device=values.device)
    bags = (arrangement.features.unsqueeze(1) * batch_size + samples).flatten()
    new_offsets = _offsets_of(offsets.diff()[bags], offsets.dtype)

    def permuted(tensor: Tensor) -> Tensor:
        sources = (arrangement.identity, arrangement.features)
        return _sum_features(tensor, offsets, *sources, new_offsets, batch_size, num_ids)

    new_weights = values.new_empty(0) if weights is None else permuted(weights)
    return permuted(values), new_offsets, new_weights


def launch_permute_features_backward(
    grad: Tensor,
    offsets: Tensor,
    new_offsets: Tensor,
    permutation: list[int],
    num_features: int,
    batch_size: int,
    num_values: int,
) -> Tensor:
    """``torchembed::permute_features_backward``."""
    # The forward copy with sources and results exchanged: a feature that was repeated has several
    # sources, which are added up in the order of the permutation.
    arrangement = _arrangement(tuple(permutation), num_features, grad.device)
    sources = (arrangement.ranges, arrangement.places)
    return _sum_features(grad, new_offsets, *sources, offsets, batch_size, num_values)


def launch_bucketize_rows(
    values: Tensor, offsets: Tensor, weights: Tensor | None, boundaries: Tensor, batch_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``torchembed::bucketize_rows``; see :func:`torchembed.ops.jagged.bucketize_rows`."""
    device = values.device
    num_ids, num_bags, num_buckets = values.numel(), offsets.numel() - 1, boundaries.shape[1] - 1
    if num_ids == 0 or num_bags == 0:
        return (
            torch.full_like(values, -1),
            offsets.new_zeros(num_buckets * num_bags + 1),
            values.new_empty(0) if weights is None else weights.clone(),
            torch.arange(num_ids, device=device, dtype=torch.int32),
        )
    num_tiles = triton.cdiv(num_ids, _BLOCK_IDS)
    buckets = torch.empty(num_ids, device=device, dtype=torch.int32)
    local = torch.empty_like(values)
    lengths = torch.zeros(num_buckets * num_bags, device=device, dtype=torch.int32)
    tile_counts = torch.empty((num_buckets + 1) * num_tiles, device=device, dtype=torch.int32)
    with torch.cuda.device_of(values):
        _bucketize_rows_count_kernel[(num_tiles,)](
            values,
            offsets,
            boundaries,
            buckets,
            local,
            lengths,
            tile_counts,
            num_ids,
            num_bags,
            batch_size,
            num_buckets,
            BLOCK=_BLOCK_IDS,
        )
    new_values = torch.empty_like(values)
    new_weights = values.new_empty(0) if weights is None else torch.empty_like(weights)
    positions = torch.empty_like(buckets)
    with torch.cuda.device_of(values):
        _bucketize_rows_place_kernel[(num_tiles,)](
            buckets,
            local,
            weights,
            _offsets_of(tile_counts, torch.int32),
            new_values,
            new_weights,
            positions,
            num_ids,
            num_buckets,
            HAS_WEIGHTS=weights is not None,
            BLOCK=_BLOCK_IDS,
        )
    return new_values, _offsets_of(lengths, offsets.dtype), new_weights, positions
