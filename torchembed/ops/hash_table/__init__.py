"""Hash tables: from any 64-bit key to the slot that holds it, in bounded memory."""

from torchembed.ops.hash_table.function import (
    InsertedKeys,
    find_slots,
    insert_keys,
    int64_keys,
    touch_slots,
)
from torchembed.ops.hash_table.hashing import KeyPlaces, hash_keys, locate_keys
from torchembed.ops.hash_table.layout import (
    BLOCK_SLOTS,
    BUCKET_SLOTS,
    Counter,
    HashTables,
    Policy,
    TableShape,
    empty_hash_tables,
    geometry_of,
    table_shape,
)

__all__ = [
    "BLOCK_SLOTS",
    "BUCKET_SLOTS",
    "Counter",
    "HashTables",
    "InsertedKeys",
    "KeyPlaces",
    "Policy",
    "TableShape",
    "empty_hash_tables",
    "find_slots",
    "geometry_of",
    "hash_keys",
    "insert_keys",
    "int64_keys",
    "locate_keys",
    "table_shape",
    "touch_slots",
]
