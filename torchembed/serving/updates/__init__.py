"""Online updates of served models: from their stream into rows, caches and dense parts."""

from torchembed.serving.updates.applier_statistics import (
    ApplierStatistics,
    DropReason,
    Freshness,
    TableUpdates,
)
from torchembed.serving.updates.update_applier import ApplierOptions, UpdateApplier, UpdatedModels

__all__ = [
    "ApplierOptions",
    "ApplierStatistics",
    "DropReason",
    "Freshness",
    "TableUpdates",
    "UpdateApplier",
    "UpdatedModels",
]
