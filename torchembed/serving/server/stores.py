"""The stores below caches, as a configuration says."""

import contextlib
from typing import NamedTuple

from torchembed.serving.configuration import (
    PersistentConfig,
    ServerConfig,
    VolatileConfig,
    VolatileKind,
)
from torchembed.serving.levels import LevelRules
from torchembed.serving.models.model_options import RowBytes
from torchembed.stores import (
    RedisOptions,
    RedisStore,
    RedisTls,
    RocksDBOptions,
    RocksDBStore,
    RowStore,
    VolatileMemoryStore,
    volatile_memory_bytes,
)

_ROCKSDB_KEY_BYTES = 6
"""Bytes a key of the filters and indexes by which RocksDB finds it."""


class StoreStack(NamedTuple):
    """The stores of a server.

    Attributes:
        names: of the stores, for metrics.
        stores: the uppermost first.
        rules: of each of them.
        row_bytes: what rows take of this process's memory, in all of them together.
        records: the one that keeps its rows when the process ends, and takes further ones; None
            where there is none.
    """

    names: tuple[str, ...]
    stores: tuple[RowStore, ...]
    rules: tuple[LevelRules, ...]
    row_bytes: RowBytes
    records: RowStore | None


def open_stores(config: ServerConfig, stack: contextlib.ExitStack) -> StoreStack:
    """Open the stores of a server, which ``stack`` closes.

    Raises:
        ValueError: for values that stores refuse.
        RowStoreError, OSError: where a store cannot be opened.
    """
    names: list[str] = []
    stores: list[RowStore] = []
    rules: list[LevelRules] = []
    records = None
    if config.volatile is not None:
        is_own = config.volatile.kind is VolatileKind.MEMORY
        names.append(config.volatile.kind.value)
        stores.append(stack.enter_context(_volatile(config.volatile)))
        rules.append(
            LevelRules(
                initial_share=config.volatile.initial_share,
                is_own=is_own,
                inserts_missed_rows=config.volatile.inserts_missed_rows,
            )
        )
        records = None if is_own else stores[-1]
    if config.persistent is not None:
        names.append("rocksdb")
        stores.append(stack.enter_context(_persistent(config.persistent)))
        rules.append(LevelRules(max_batch_rows=config.persistent.max_batch_rows))
        records = None if config.persistent.is_read_only else stores[-1]
    return StoreStack(tuple(names), tuple(stores), tuple(rules), row_bytes_of(config), records)


def row_bytes_of(config: ServerConfig) -> RowBytes:
    """Bytes that rows take of the memory of a server's process: in its volatile memory, and to be
    found in RocksDB. Rows in Redis take that of its own processes."""

    def row_bytes(num_rows: int, line_bytes: int) -> int:
        num_bytes, volatile = 0, config.volatile
        if volatile is not None and volatile.kind is VolatileKind.MEMORY:
            # Rows that are missed may come beside those of the share, and updated ones, too.
            num_bytes += volatile_memory_bytes(num_rows, line_bytes, volatile.options)
        if config.persistent is not None:
            num_bytes += num_rows * _ROCKSDB_KEY_BYTES
        return num_bytes

    return row_bytes


def loads_rows(config: ServerConfig) -> bool:
    """True where the rows of models are loaded into the stores, false where these have them."""
    if config.persistent is not None:
        return config.persistent.is_loaded and not config.persistent.is_read_only
    return config.volatile is not None and config.volatile.initial_share > 0


def _volatile(config: VolatileConfig) -> VolatileMemoryStore | RedisStore:
    if config.kind is VolatileKind.MEMORY:
        return VolatileMemoryStore(config.options)
    tls = None
    if config.tls is not None:
        tls = RedisTls(
            ca_certificate=config.tls.ca_certificate,
            client_certificate=config.tls.certificate,
            client_key=config.tls.key,
            server_name=config.tls.server_name,
        )
    redis = RedisOptions(
        addresses=config.addresses,
        is_cluster=config.is_cluster,
        user_name=config.user_name,
        password=config.password,
        tls=tls,
        num_connections=config.num_connections,
        timeout_seconds=config.timeout_seconds,
    )
    return RedisStore(redis, config.options)


def _persistent(config: PersistentConfig) -> RocksDBStore:
    options = RocksDBOptions(num_threads=config.num_threads)
    if config.is_read_only:
        return RocksDBStore.open_read_only(config.path, options)
    return RocksDBStore(config.path, options)
