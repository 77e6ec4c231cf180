"""Rows by key outside the device, in host memory, on disk or in Redis: what tiers of tables and
servers read and write.

A row is a line of bytes, all of one length within a table; what the bytes mean, its users know.
"""

from typing import TYPE_CHECKING

from torchembed.core.later_imports import later_imports
from torchembed.stores.errors import (
    CorruptStoreError,
    RowStoreError,
    StoreAccessError,
    StoreFullError,
    StoreInUseError,
    StoreUnavailableError,
)
from torchembed.stores.interface import LineChunk, RowStore, RowTable

if TYPE_CHECKING:
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

_REDIS, _ROCKSDB = "torchembed.stores.redis", "torchembed.stores.rocksdb"
_VOLATILE = "torchembed.stores.volatile"
# Servers and tables on disk alone have stores, and each of them uses few.
__getattr__ = later_imports(
    __name__,
    {
        "Compression": f"{_ROCKSDB}.options",
        "MemoryStore": "torchembed.stores.memory",
        "OverflowPolicy": f"{_VOLATILE}.options",
        "ReadAheadCounts": "torchembed.stores.read_ahead",
        "ReadAheadTable": "torchembed.stores.read_ahead",
        "RedisLayout": f"{_REDIS}.options",
        "RedisOptions": f"{_REDIS}.options",
        "RedisStore": f"{_REDIS}.store",
        "RedisTls": f"{_REDIS}.options",
        "RocksDBOptions": f"{_ROCKSDB}.options",
        "RocksDBStore": f"{_ROCKSDB}.store",
        "VolatileMemoryStore": f"{_VOLATILE}.memory",
        "VolatileOptions": f"{_VOLATILE}.options",
        "sync_to_disk": f"{_ROCKSDB}.files",
        "volatile_memory_bytes": f"{_VOLATILE}.memory_bytes",
    },
)

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
