"""Rearranging jagged batches: features in another order, ids by row range, bags padded."""

from torchembed.ops.jagged.function import (
    BucketizedRows,
    PermutedFeatures,
    bucketize_rows,
    pad_jagged,
    permute_features,
)

__all__ = [
    "BucketizedRows",
    "PermutedFeatures",
    "bucketize_rows",
    "pad_jagged",
    "permute_features",
]
