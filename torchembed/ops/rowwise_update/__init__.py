"""Summing the gradients of each touched row and updating it, in one pass."""

from torchembed.ops.rowwise_update.function import (
    RoundingKeys,
    RowGradients,
    UpdateRule,
    rowwise_update,
)

__all__ = ["RoundingKeys", "RowGradients", "UpdateRule", "rowwise_update"]
