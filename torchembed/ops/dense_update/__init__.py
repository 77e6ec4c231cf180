"""Updating a flat buffer of dense weights and their 16-bit copy, in one pass."""

from torchembed.ops.dense_update.function import DenseRule, dense_update

__all__ = ["DenseRule", "dense_update"]
