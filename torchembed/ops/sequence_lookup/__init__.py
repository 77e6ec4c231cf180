"""Looking up one vector for each id."""

from torchembed.ops.sequence_lookup.function import sequence_lookup

__all__ = ["sequence_lookup"]
