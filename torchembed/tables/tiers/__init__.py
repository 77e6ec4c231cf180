"""Tables whose rows live outside the device, behind a cache on it."""

from torchembed.tables.tiers.cache_statistics import (
    CacheStatistics,
    CacheStatisticsReader,
    CacheStatisticsReading,
    CountedCaches,
)
from torchembed.tables.tiers.host_memory import host_tensor
from torchembed.tables.tiers.tiered_group import FetchedRows, TieredGroup

__all__ = [
    "CacheStatistics",
    "CacheStatisticsReader",
    "CacheStatisticsReading",
    "CountedCaches",
    "FetchedRows",
    "TieredGroup",
    "host_tensor",
]
