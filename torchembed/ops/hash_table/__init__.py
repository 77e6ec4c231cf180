"""Hash tables: from any 64-bit key to the slot that holds it, in bounded memory."""

from torchembed.core.hash_tables import BUCKET_SLOTS, Counter, Policy
from torchembed.ops.hash_table.function import (
    InsertedKeys,
    assign_scores,
    erase_keys,
    find_slots,
    insert_keys,
    int64_keys,
    touch_slots,
)
from torchembed.ops.hash_table.growth import GrownTables, grow, moved_rows
from torchembed.ops.hash_table.hashing import KeyPlaces, hash_keys, key_digests, locate_keys
from torchembed.ops.hash_table.layout import (
    BLOCK_SLOTS,
    HashTables,
    SlotRange,
    TableShape,
    empty_hash_tables,
    geometry_of,
    growing_shapes,
    slot_ranges,
    table_shape,
)
from torchembed.ops.hash_table.placing import place_keys
from torchembed.ops.hash_table.sweeps import (
    ErasedKeys,
    ExportedKeys,
    coldest,
    count_erased,
    erase_if,
    export_keys,
)

__all__ = [
    "BLOCK_SLOTS",
    "BUCKET_SLOTS",
    "Counter",
    "ErasedKeys",
    "ExportedKeys",
    "GrownTables",
    "HashTables",
    "InsertedKeys",
    "KeyPlaces",
    "Policy",
    "SlotRange",
    "TableShape",
    "assign_scores",
    "coldest",
    "count_erased",
    "empty_hash_tables",
    "erase_if",
    "erase_keys",
    "export_keys",
    "find_slots",
    "geometry_of",
    "grow",
    "growing_shapes",
    "hash_keys",
    "insert_keys",
    "int64_keys",
    "key_digests",
    "locate_keys",
    "moved_rows",
    "place_keys",
    "slot_ranges",
    "table_shape",
    "touch_slots",
]
