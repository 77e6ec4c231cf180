"""The specification of the ``jagged`` operations in eager torch."""

import torch
from torch import Tensor


def _offsets_of(lengths: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(dtype)


def _bags_of_ids(offsets: Tensor, num_ids: int) -> Tensor:
    """The bag of each position, int64 ``[L]``; the number of bags past the last one."""
    positions = torch.arange(num_ids, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets[1:].contiguous(), positions, right=True)


def _permuted_bags(permutation: list[int], batch_size: int, device: torch.device) -> Tensor:
    """The bag that each bag of the result is a copy of, int64 ``[K * B]``."""
    features = torch.tensor(permutation, device=device, dtype=torch.int64)
    samples = torch.arange(batch_size, device=device)
    return (features.unsqueeze(1) * batch_size + samples).flatten()


def _sources(offsets: Tensor, new_offsets: Tensor, bags: Tensor, num_ids: int) -> Tensor:
    """The position that each id of the result is a copy of, int64; -1 for spare ones."""
    new_bags = _bags_of_ids(new_offsets, num_ids)
    # An extra bag takes the positions past the last one, so that every index is in range.
    shifts = torch.nn.functional.pad(offsets[bags].long() - new_offsets[:-1].long(), (0, 1))
    positions = torch.arange(num_ids, device=offsets.device)
    return torch.where(new_bags < bags.numel(), positions + shifts[new_bags], -1)


def _take(tensor: Tensor, positions: Tensor) -> Tensor:
    """``tensor[positions]``, zero for a position of -1."""
    return torch.nn.functional.pad(tensor, (0, 1))[positions]


def permute_features_forward_reference(
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    permutation: list[int],
    num_features: int,
    batch_size: int,
    num_ids: int,
) -> tuple[Tensor, Tensor, Tensor]:
    bags = _permuted_bags(permutation, batch_size, offsets.device)
    new_offsets = _offsets_of(offsets.diff()[bags], offsets.dtype)
    sources = _sources(offsets, new_offsets, bags, num_ids)
    new_weights = values.new_empty(0) if weights is None else _take(weights, sources)
    return _take(values, sources), new_offsets, new_weights


def permute_features_backward_reference(
    grad: Tensor,
    offsets: Tensor,
    new_offsets: Tensor,
    permutation: list[int],
    num_features: int,
    batch_size: int,
    num_values: int,
) -> Tensor:
    bags = _permuted_bags(permutation, batch_size, offsets.device)
    sources = _sources(offsets, new_offsets, bags, grad.numel())
    total = torch.zeros(num_values + 1, device=grad.device)
    total.index_add_(0, torch.where(sources >= 0, sources, num_values), grad.float())
    return total[:num_values].to(grad.dtype)


def bucketize_rows_reference(
    values: Tensor, offsets: Tensor, weights: Tensor | None, boundaries: Tensor, batch_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_buckets, num_bags = boundaries.shape[1] - 1, offsets.numel() - 1
    bags = _bags_of_ids(offsets, values.numel())
    in_bag = bags < num_bags
    # An extra row of empty ranges is for ids that no bag holds.
    ranges = torch.cat([boundaries, boundaries.new_zeros(1, num_buckets + 1)])
    ranges = ranges[torch.where(in_bag, bags // max(batch_size, 1), -1)]
    ids = values.long().unsqueeze(1)
    buckets = (ids >= ranges[:, 1:-1]).sum(1, keepdim=True)
    inside = (ids >= ranges[:, :1]) & (ids < ranges[:, -1:])
    local = torch.where(inside, ids - ranges.gather(1, buckets), -1).squeeze(1)
    # Ids in no range go to the first bucket that has one, so that none is lost.
    fallback = (ranges[:, 1:-1] <= ranges[:, :1]).sum(1, keepdim=True)
    buckets = torch.where(inside, buckets, fallback).squeeze(1)

    buckets = torch.where(in_bag, buckets, num_buckets)
    order = torch.sort(buckets, stable=True).indices
    positions = torch.empty_like(order, dtype=torch.int32)
    positions[order] = torch.arange(order.numel(), device=order.device, dtype=torch.int32)
    new_bags = torch.where(in_bag, buckets * num_bags + bags, num_buckets * num_bags)
    lengths = torch.zeros(num_buckets * num_bags + 1, device=order.device, dtype=torch.int64)
    lengths.scatter_add_(0, new_bags, torch.ones_like(new_bags))
    new_weights = values.new_empty(0) if weights is None else weights[order]
    return (
        local[order].to(values.dtype),
        _offsets_of(lengths[:-1], offsets.dtype),
        new_weights,
        positions,
    )
