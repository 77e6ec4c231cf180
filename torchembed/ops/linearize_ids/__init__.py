"""Ids of each feature into rows of a table group's flat weight."""

from torchembed.ops.linearize_ids.function import LinearRows, linearize_ids, locate_bad_id

__all__ = ["LinearRows", "linearize_ids", "locate_bad_id"]
