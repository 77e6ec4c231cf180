"""Ids in the order of the ranks that hold their rows, whatever the partitions of their tables."""

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.ops.jagged import BucketizedRows, bucketize_rows
from torchembed.ops.linearize_ids.reference import id_features
from torchembed.sharding.transport.layout import Layout


def bucketize_ids(features: SparseFeatures, layout: Layout) -> BucketizedRows:
    """The ids of jagged ``features``, one for each part of ``layout``, rank by rank, as the row
    index of each rank takes them.

    Where partitions are ranges that is one operation, and ids in no range become -1. Of others,
    which may have -1 among their ids, the lengths of bags alone say which positions hold one.
    """
    values, offsets, batch_size = features.values, features.offsets, features.batch_size
    assert offsets is not None
    device = values.device
    if layout.are_ranges:
        boundaries = layout.boundaries(device)
        return bucketize_rows(
            values, offsets, boundaries, batch_size=batch_size, weights=features.weights
        )
    places, local = _places_and_ids(features, layout)
    # As if each rank held one row, numbered by its place among those that share the table.
    boundaries = layout.places(device)
    buckets = bucketize_rows(
        places, offsets, boundaries, batch_size=batch_size, weights=features.weights
    )
    # What was bucketized are places; the ids follow them to their positions.
    ids = torch.empty_like(values).scatter_(0, buckets.positions.long(), local)
    return buckets._replace(values=ids)


def _places_and_ids(features: SparseFeatures, layout: Layout) -> tuple[Tensor, Tensor]:
    """For each id the place of its rank among those that share its table, -1 for none, and what
    that rank's index is asked for."""
    values, device = features.values, features.values.device
    parts = id_features(features.offsets, [], features.batch_size, values.numel(), device)
    places, local = torch.full_like(values, -1), torch.full_like(values, -1)
    first_places = layout.places(device)
    for number, partition in enumerate(layout.partitions):
        ranks = partition.rank_of(values)
        ranks.masked_fill_(parts != number, -1)
        # No branch on what the ids are: that would make the host wait for the GPU. Each rank's
        # local ids are computed of all ids, in a copy, and those of its own are taken.
        for shared in partition.ranks:
            is_there, ids = ranks == shared, values.clone()
            partition.make_local(ids, shared)
            local = torch.where(is_there, ids, local)
            places = torch.where(is_there, first_places[number, shared].to(places.dtype), places)
    return places, local
