"""Rows by key outside the device, in host memory or on disk: what tiers of tables and servers read
and write.

A row is a line of bytes, all of one length within a table; what the bytes mean, its users know.
"""

from torchembed.stores.errors import CorruptStoreError, RowStoreError, StoreInUseError
from torchembed.stores.interface import LineChunk, RowStore, RowTable
from torchembed.stores.memory import MemoryStore
from torchembed.stores.read_ahead import ReadAheadCounts, ReadAheadTable
from torchembed.stores.rocksdb import RocksDBStore
from torchembed.stores.rocksdb_files import sync_to_disk
from torchembed.stores.rocksdb_options import Compression, RocksDBOptions
from torchembed.stores.volatile_memory import VolatileMemoryStore
from torchembed.stores.volatile_options import OverflowPolicy, VolatileOptions

__all__ = [
    "Compression",
    "CorruptStoreError",
    "LineChunk",
    "MemoryStore",
    "OverflowPolicy",
    "ReadAheadCounts",
    "ReadAheadTable",
    "RocksDBOptions",
    "RocksDBStore",
    "RowStore",
    "RowStoreError",
    "RowTable",
    "StoreInUseError",
    "VolatileMemoryStore",
    "VolatileOptions",
    "sync_to_disk",
]
