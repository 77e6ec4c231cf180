"""The stores below caches, as a configuration says."""

import contextlib
from typing import NamedTuple

from torchembed.serving.configuration import (
    PersistentConfig,
    ServerConfig,
    VolatileConfig,
    VolatileKind,
)
from torchembed.stores import (
    RedisOptions,
    RedisStore,
    RedisTls,
    RocksDBStore,
    RowStore,
    VolatileMemoryStore,
)


class StoreStack(NamedTuple):
    """The stores of a server.

    Attributes:
        names: of the stores, for metrics.
        stores: the uppermost first.
        persistent: the one that keeps its rows when the process ends; None where there is none.
    """

    names: tuple[str, ...]
    stores: tuple[RowStore, ...]
    persistent: RowStore | None


def open_stores(config: ServerConfig, stack: contextlib.ExitStack) -> StoreStack:
    """Open the stores of a server, which ``stack`` closes.

    Raises:
        ValueError: for settings that are not there yet, or values that stores refuse.
        RowStoreError, OSError: where a store cannot be opened.
    """
    names: list[str] = []
    stores: list[RowStore] = []
    if config.volatile is not None:
        names.append(config.volatile.kind.value)
        stores.append(stack.enter_context(_volatile(config.volatile)))
    persistent = None
    if config.persistent is not None:
        names.append("rocksdb")
        persistent = stack.enter_context(_persistent(config.persistent))
        stores.append(persistent)
    elif config.volatile is not None and config.volatile.kind is VolatileKind.REDIS:
        persistent = stores[-1]
    return StoreStack(tuple(names), tuple(stores), persistent)


def _volatile(config: VolatileConfig) -> VolatileMemoryStore | RedisStore:
    if config.initial_share != 1:
        raise ValueError(
            "volatile.initial_share must be 1, since models are loaded whole, got "
            f"{config.initial_share}"
        )
    if not config.inserts_missed_rows:
        raise ValueError(
            "volatile.inserts_missed_rows must be true, since rows that only the persistent level "
            "had are always written above it"
        )
    if config.kind is VolatileKind.MEMORY:
        return VolatileMemoryStore(config.options)
    tls = None
    if config.tls is not None:
        if config.tls.server_name is not None:
            raise ValueError(
                "volatile.tls.server_name must be left out: certificates must be made out to the "
                "servers' addresses"
            )
        tls = RedisTls(
            ca_certificate=config.tls.ca_certificate,
            client_certificate=config.tls.certificate,
            client_key=config.tls.key,
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
    if config.is_read_only:
        raise ValueError("persistent.is_read_only must be false: RocksDB is opened to be written")
    return RocksDBStore(config.path)
