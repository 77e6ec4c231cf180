"""Rows of served tables: looked up in a cache on the device, and in stores below it."""

from torchembed.serving.levels.embedding_cache import (
    CACHED_KEY_BYTES,
    CachedRows,
    CacheKind,
    EmbeddingCache,
    FoundRows,
    TableCounts,
)
from torchembed.serving.levels.level import LevelStatistics
from torchembed.serving.levels.level_rules import LevelRules, LoadedPart
from torchembed.serving.levels.leveled_lookup import LeveledLookup, LookedUpRows, PooledFeatures
from torchembed.serving.levels.lookup_statistics import LookupStatistics, Stage
from torchembed.serving.levels.row_format import RowFormat
from torchembed.serving.levels.row_levels import ReadLines, RowLevels
from torchembed.serving.levels.served_table import ServedFeature, ServedTable

__all__ = [
    "CACHED_KEY_BYTES",
    "CacheKind",
    "CachedRows",
    "EmbeddingCache",
    "FoundRows",
    "LevelRules",
    "LevelStatistics",
    "LeveledLookup",
    "LoadedPart",
    "LookedUpRows",
    "LookupStatistics",
    "PooledFeatures",
    "ReadLines",
    "RowFormat",
    "RowLevels",
    "ServedFeature",
    "ServedTable",
    "Stage",
    "TableCounts",
]
