"""Rows by key outside the device, in host memory, on disk or in Redis: what tiers of tables and
servers read and write.

A row is a line of bytes, all of one length within a table; what the bytes mean, its users know.
"""

from torchembed.stores.errors import (
    CorruptStoreError,
    RowStoreError,
    StoreAccessError,
    StoreFullError,
    StoreInUseError,
    StoreUnavailableError,
)
from torchembed.stores.interface import LineChunk, RowStore, RowTable
from torchembed.stores.memory import MemoryStore
from torchembed.stores.read_ahead import ReadAheadCounts, ReadAheadTable
from torchembed.stores.redis.options import RedisLayout, RedisOptions, RedisTls
from torchembed.stores.redis.store import RedisStore
from torchembed.stores.rocksdb.files import sync_to_disk
from torchembed.stores.rocksdb.options import Compression, RocksDBOptions
from torchembed.stores.rocksdb.store import RocksDBStore
from torchembed.stores.volatile.memory import VolatileMemoryStore
from torchembed.stores.volatile.memory_bytes import volatile_memory_bytes
from torchembed.stores.volatile.options import OverflowPolicy, VolatileOptions

__all__ = [
    "Compression",
    "CorruptStoreError",
    "LineChunk",
    "MemoryStore",
    "OverflowPolicy",
    "ReadAheadCounts",
    "ReadAheadTable",
    "RedisLayout",
    "RedisOptions",
    "RedisStore",
    "RedisTls",
    "RocksDBOptions",
    "RocksDBStore",
    "RowStore",
    "RowStoreError",
    "RowTable",
    "StoreAccessError",
    "StoreFullError",
    "StoreInUseError",
    "StoreUnavailableError",
    "VolatileMemoryStore",
    "VolatileOptions",
    "sync_to_disk",
    "volatile_memory_bytes",
]
