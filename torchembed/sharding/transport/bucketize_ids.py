"""Ids in the order of the ranks that hold their rows, whatever the partitions of their tables."""

import torch

from torchembed.core.features import SparseFeatures
from torchembed.ops.jagged import BucketizedRows, bucketize_rows
from torchembed.ops.linearize_ids.reference import id_features
from torchembed.sharding.transport.layout import Layout


def bucketize_ids(features: SparseFeatures, layout: Layout) -> BucketizedRows:
    """The ids of jagged ``features``, one for each part of ``layout``, rank by rank, as the row
    index of each rank takes them.

    Ids in no range of a part that has ranges become -1. Where a hash chooses ranks -1 may be an id,
    and the lengths of bags alone say which positions hold one. The number of operations depends on
    the different partitions, and not on the number of parts or ranks.
    """
    values, offsets, batch_size = features.values, features.offsets, features.batch_size
    assert offsets is not None
    device = values.device
    numbers, is_hashed = values, None
    if not layout.are_ranges:
        parts = id_features(offsets, [], batch_size, values.numel(), device)
        for partition, has_partition in layout.hashed_parts(device).items():
            has_it = has_partition[parts]
            numbers = torch.where(has_it, partition.places_of(values).to(values.dtype), numbers)
            is_hashed = has_it if is_hashed is None else is_hashed | has_it
    buckets = bucketize_rows(
        numbers,
        offsets,
        layout.boundaries(device),
        batch_size=batch_size,
        weights=features.weights,
    )
    if is_hashed is None:
        return buckets
    # What was bucketized are places of ranks; the ids follow them to their positions.
    positions = buckets.positions.long()
    ids = torch.empty_like(values).scatter_(0, positions, values)
    keeps_id = torch.empty_like(is_hashed).scatter_(0, positions, is_hashed)
    return buckets._replace(values=torch.where(keeps_id, ids, buckets.values))
