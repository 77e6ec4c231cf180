"""Looking rows up and pooling each bag, for all features of a table group in one call."""

from torchembed.ops.pooled_lookup.function import (
    LookupInputs,
    LookupStore,
    fixed_gradient_map,
    pooled_lookup,
)

__all__ = ["LookupInputs", "LookupStore", "fixed_gradient_map", "pooled_lookup"]
