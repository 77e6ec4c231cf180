"""Tables: rows and their optimizer state, and the index that turns ids into rows."""

from torchembed.tables.dynamic.admission_filters import (
    AdmissionFilter,
    Chance,
    CountMinSketch,
    Probability,
)
from torchembed.tables.dynamic.deletion_log import DeletionLog, SnapshotDueError
from torchembed.tables.dynamic.delta_of_ranks import delta_on_all_ranks, gather_delta
from torchembed.tables.dynamic.group_growth import can_grow_to, grow_to
from torchembed.tables.dynamic.hash_factory import HashFactory
from torchembed.tables.dynamic.hash_index import HashIndex
from torchembed.tables.dynamic.hashed_rows import HashedRows, with_shared_rows
from torchembed.tables.dynamic.loaded_ids import count_misplaced_rows, wrong_digests
from torchembed.tables.dynamic.minimum_count import MinimumCount
from torchembed.tables.dynamic.policies import (
    LFU,
    LRU,
    AdmissionPolicy,
    CallerScores,
    DecayingLFU,
    Dynamic,
    EpochLFU,
    Eviction,
    check_at_least,
    check_score,
)
from torchembed.tables.dynamic.table_delta import (
    Delta,
    DeltaMark,
    Operation,
    TableDelta,
    TableMark,
    read_delta,
    read_mark,
)
from torchembed.tables.dynamic.table_growth import GrowingTables, TableGrowth
from torchembed.tables.dynamic.table_statistics import (
    CountedTables,
    StatisticsReader,
    StatisticsReading,
    TableStatistics,
)
from torchembed.tables.gradients.pending_gradients import PendingGradients, RecordedGradients
from torchembed.tables.gradients.table_gradient import TableGradient, why_refused
from torchembed.tables.group import ConvertedRows, TableGroup
from torchembed.tables.group_weight import GroupWeight, group_weight
from torchembed.tables.initial_values import InitializedTable, initial_values
from torchembed.tables.initializers import (
    Constant,
    Initializer,
    InPlaceFunction,
    Normal,
    RowIds,
    Uniform,
    is_function_of_id,
    shifted_row_key,
)
from torchembed.tables.joined_group import JoinedGroup, join_groups, joined_where_whole
from torchembed.tables.missing_rows import (
    Missing,
    MissingRows,
    MissingValue,
    MissingVectors,
    check_missing,
)
from torchembed.tables.model_device import model_device
from torchembed.tables.row_index import (
    Admission,
    AdmittedRows,
    IndexedTable,
    IndexFactory,
    RangeFactory,
    RangeIndex,
    RowIndex,
    SlotIndex,
)
from torchembed.tables.rows.row_stream import (
    RowChunk,
    read_rows,
    row_chunks,
    row_ranges,
    table_states,
    write_numbered_rows,
    write_rows,
)
from torchembed.tables.rows.rows_by_id import clear_ids, erase_ids, take_over
from torchembed.tables.storage import Disk, HostMemory, Storage
from torchembed.tables.table import (
    GradientReduction,
    IdShare,
    Table,
    TableOwner,
    TableSpec,
    WeightHolder,
    check_own_rows,
    table_of,
)
from torchembed.tables.table_addresses import table_at, table_numbered
from torchembed.tables.table_set import TableSet
from torchembed.tables.tiers import (
    LINES,
    CacheStatistics,
    CacheStatisticsReader,
    CacheStatisticsReading,
    CountedCaches,
    DiskGroup,
    FetchedRows,
    LineLayout,
    RecordedMoves,
    TieredGroup,
    meta_rows_in_state_dicts,
    recording_moves,
)

__all__ = [
    "LFU",
    "LINES",
    "LRU",
    "Admission",
    "AdmissionFilter",
    "AdmissionPolicy",
    "AdmittedRows",
    "CacheStatistics",
    "CacheStatisticsReader",
    "CacheStatisticsReading",
    "CallerScores",
    "Chance",
    "Constant",
    "ConvertedRows",
    "CountMinSketch",
    "CountedCaches",
    "CountedTables",
    "DecayingLFU",
    "DeletionLog",
    "Delta",
    "DeltaMark",
    "Disk",
    "DiskGroup",
    "Dynamic",
    "EpochLFU",
    "Eviction",
    "FetchedRows",
    "GradientReduction",
    "GroupWeight",
    "GrowingTables",
    "HashFactory",
    "HashIndex",
    "HashedRows",
    "HostMemory",
    "IdShare",
    "InPlaceFunction",
    "IndexFactory",
    "IndexedTable",
    "InitializedTable",
    "Initializer",
    "JoinedGroup",
    "LineLayout",
    "MinimumCount",
    "Missing",
    "MissingRows",
    "MissingValue",
    "MissingVectors",
    "Normal",
    "Operation",
    "PendingGradients",
    "Probability",
    "RangeFactory",
    "RangeIndex",
    "RecordedGradients",
    "RecordedMoves",
    "RowChunk",
    "RowIds",
    "RowIndex",
    "SlotIndex",
    "SnapshotDueError",
    "StatisticsReader",
    "StatisticsReading",
    "Storage",
    "Table",
    "TableDelta",
    "TableGradient",
    "TableGroup",
    "TableGrowth",
    "TableMark",
    "TableOwner",
    "TableSet",
    "TableSpec",
    "TableStatistics",
    "TieredGroup",
    "Uniform",
    "WeightHolder",
    "can_grow_to",
    "check_at_least",
    "check_missing",
    "check_own_rows",
    "check_score",
    "clear_ids",
    "count_misplaced_rows",
    "delta_on_all_ranks",
    "erase_ids",
    "gather_delta",
    "group_weight",
    "grow_to",
    "initial_values",
    "is_function_of_id",
    "join_groups",
    "joined_where_whole",
    "meta_rows_in_state_dicts",
    "model_device",
    "read_delta",
    "read_mark",
    "read_rows",
    "recording_moves",
    "row_chunks",
    "row_ranges",
    "shifted_row_key",
    "table_at",
    "table_numbered",
    "table_of",
    "table_states",
    "take_over",
    "why_refused",
    "with_shared_rows",
    "write_numbered_rows",
    "write_rows",
    "wrong_digests",
]
