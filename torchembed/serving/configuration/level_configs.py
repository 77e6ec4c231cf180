"""The configurations of the stores below caches."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from torchembed.core.addresses import parse_address
from torchembed.serving.configuration.choices import VolatileKind
from torchembed.serving.configuration.fields import (
    AboveUpTo,
    AtLeast,
    Between,
    Inside,
    check_fields,
)
from torchembed.stores import OverflowPolicy, VolatileOptions
from torchembed.stores.volatile.options import MAX_BATCH_ROWS
from torchembed.streams.source_options import MAX_MESSAGES


@dataclasses.dataclass(frozen=True, kw_only=True)
class RedisTlsConfig:
    """How connections to Redis are secured: PEM files.

    Raises:
        ValueError: for values that cannot be; it begins with the field's name.
    """

    ca_certificate: Path | None = None
    """Of who signed the servers' certificates; without it those that the machine trusts."""
    certificate: Path | None = None
    """Of this client, where servers ask for one."""
    key: Path | None = None
    """The private key of ``certificate``."""
    server_name: str | None = None
    """The name that the servers' certificates must have, where it is not their address."""

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key must be given together, got one of them")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VolatileConfig:
    """The level of rows that does not outlive its store: host memory, or Redis.

    Raises:
        ValueError: for values that cannot be; it begins with the field's name.
    """

    kind: VolatileKind = VolatileKind.MEMORY
    addresses: tuple[str, ...] = ()
    """``host:port`` of Redis; of a cluster one node, or several to ask in turn."""
    is_cluster: bool = False
    """Whether ``addresses`` are of a cluster."""
    user_name: str | None = None
    password: str | None = dataclasses.field(default=None, repr=False)
    tls: RedisTlsConfig | None = None
    """Without it connections are open to read."""
    num_connections: Annotated[int, AtLeast(1)] = 5
    """To each node of Redis."""
    timeout_seconds: Annotated[float, AboveUpTo(0)] = 5.0
    """For one command of Redis."""
    num_partitions: Annotated[int, AtLeast(1)] = 8
    """Of each table. It must stay what it was when the first row was written to Redis."""
    max_batch_rows: Annotated[int, Between(1, MAX_BATCH_ROWS)] = 65_536
    """Rows of one command."""
    overflow_margin_rows: Annotated[int, AtLeast(1)] | None = None
    """Rows of a partition from which on some are evicted; without it none are. Where there is no
    persistent level, those are answered by their defaults then."""
    overflow_policy: OverflowPolicy = OverflowPolicy.EVICT_OLDEST
    overflow_resolution_target: Annotated[float, Inside(0, 1)] = 0.8
    """Part of ``overflow_margin_rows`` that is left then."""
    initial_share: Annotated[float, Between(0, 1)] = 1.0
    """Part of each table that is written to it when a model is loaded, and to memory also where the
    persistent level has the rows from before; 0 for nothing, where Redis has rows already, or
    updates bring them. Between 0 and 1 a persistent level has the others."""
    inserts_missed_rows: bool = True
    """Whether rows that only the persistent level had are written to it."""

    def __post_init__(self) -> None:
        check_fields(self)
        for i, address in enumerate(self.addresses):
            parse_address(f"addresses[{i}]", address)
        is_redis = self.kind is VolatileKind.REDIS
        if is_redis and not self.addresses:
            raise ValueError("addresses must name at least one server of Redis, got none")
        if is_redis:
            return
        for name in ("addresses", "is_cluster", "user_name", "password", "tls"):
            if getattr(self, name):
                raise ValueError(f"{name} must be left out where kind is memory; make kind redis")

    @property
    def options(self) -> VolatileOptions:
        """What its store is made with."""
        return VolatileOptions(
            num_partitions=self.num_partitions,
            overflow_margin_rows=self.overflow_margin_rows,
            overflow_policy=self.overflow_policy,
            overflow_resolution_target=self.overflow_resolution_target,
            max_batch_rows=self.max_batch_rows,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PersistentConfig:
    """The level that has all rows: RocksDB in a folder.

    Raises:
        ValueError: for values that cannot be; it begins with the field's name.
    """

    path: Path
    is_read_only: bool = False
    """True where its rows are served as they are, and neither loaded nor updated. Any number of
    processes may read it so at once, while none writes it."""
    is_loaded: bool = True
    """Whether rows of models are written to it when these are loaded; False where it has them."""
    num_threads: Annotated[int, AtLeast(1)] = 8
    """Threads of RocksDB that sort and merge files."""
    max_batch_rows: Annotated[int, AtLeast(1)] = 65_536
    """Rows of one write."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """Where updates of rows and dense parts come from: Kafka.

    Raises:
        ValueError: for values that cannot be; it begins with the field's name.
    """

    brokers: tuple[str, ...]
    """``host:port`` of each."""
    group: str | None = None
    """Servers of one group share the messages. None for a group that all servers over one Redis
    share, one of its own for each folder of RocksDB, or, where rows are in memory alone, a new one
    with each start, which reads all messages that brokers have."""
    filters: tuple[str, ...] = ()
    """Regular expressions of topics; without them those of all models and tables."""
    max_batch_messages: Annotated[int, Between(1, MAX_MESSAGES)] = 8192
    poll_timeout_seconds: Annotated[float, AboveUpTo(0)] = 0.5
    metadata_refresh_seconds: Annotated[float, AboveUpTo(0)] = 5.0
    """After so long a new topic is found."""
    failure_back_off_seconds: Annotated[float, AboveUpTo(0)] = 0.05
    """Between attempts to apply what a store did not take."""
    start_timeout_seconds: Annotated[float, AboveUpTo(0)] = 10.0
    client_settings: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    """Properties of librdkafka by their names there, for TLS and SASL."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.brokers:
            raise ValueError("brokers must name at least one broker, got none")
        for i, broker in enumerate(self.brokers):
            parse_address(f"brokers[{i}]", broker)
        for i, expression in enumerate(self.filters):
            try:
                re.compile(expression)
            except re.error as error:
                raise ValueError(
                    f"filters[{i}] must be a regular expression, got {expression!r}: {error}"
                ) from None
