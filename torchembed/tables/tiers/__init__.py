"""Tables whose rows live outside the device, behind a cache on it."""

from torchembed.tables.tiers.cache_statistics import (
    CacheStatistics,
    CacheStatisticsReader,
    CacheStatisticsReading,
    CountedCaches,
)
from torchembed.tables.tiers.disk_group import DiskGroup
from torchembed.tables.tiers.fetched_rows import FetchedRows
from torchembed.tables.tiers.held_rows import AnnouncedRows
from torchembed.tables.tiers.host_group import HostGroup
from torchembed.tables.tiers.host_memory import host_tensor
from torchembed.tables.tiers.line_layout import LineLayout
from torchembed.tables.tiers.line_moves import RecordedMoves, recording_moves
from torchembed.tables.tiers.line_store import LINES
from torchembed.tables.tiers.meta_rows import meta_rows_in_state_dicts
from torchembed.tables.tiers.row_lines import padded_line_bytes
from torchembed.tables.tiers.tiered_group import TieredGroup

__all__ = [
    "LINES",
    "AnnouncedRows",
    "CacheStatistics",
    "CacheStatisticsReader",
    "CacheStatisticsReading",
    "CountedCaches",
    "DiskGroup",
    "FetchedRows",
    "HostGroup",
    "LineLayout",
    "RecordedMoves",
    "TieredGroup",
    "host_tensor",
    "meta_rows_in_state_dicts",
    "padded_line_bytes",
    "recording_moves",
]
