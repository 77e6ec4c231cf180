"""Rearranging jagged batches: features in another order, ids by row range."""

from torchembed.ops.jagged.function import (
    BucketizedRows,
    PermutedFeatures,
    bucketize_rows,
    permute_features,
)

__all__ = [
    "BucketizedRows",
    "PermutedFeatures",
    "bucketize_rows",
    "permute_features",
]
