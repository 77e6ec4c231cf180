"""Lookups of rows in caches that hash tables index: found, read and noted as used in one call."""

from torchembed.ops.cached_lookup.function import FoundLines, LineCopies, LineUse, cached_lookup

__all__ = ["FoundLines", "LineCopies", "LineUse", "cached_lookup"]
