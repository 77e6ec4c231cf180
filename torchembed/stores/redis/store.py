"""Tables of lines by key in Redis."""

import contextlib
import json
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from torchembed.stores.arguments import check_same_line, check_table
from torchembed.stores.errors import CorruptStoreError, RowStoreError
from torchembed.stores.interface import RowStore
from torchembed.stores.memory import MemoryStore
from torchembed.stores.redis.commands import command, exchange
from torchembed.stores.redis.connection_checks import ConnectionChecks
from torchembed.stores.redis.known_servers import KnownServers
from torchembed.stores.redis.layout import (
    HUGECTR_TABLES,
    REGISTRY,
    PartitionNames,
    hugectr_table,
    partition_names,
)
from torchembed.stores.redis.nodes import RedisNodes
from torchembed.stores.redis.options import RedisLayout, RedisOptions
from torchembed.stores.redis.overflow import OverflowResolver
from torchembed.stores.redis.table import RedisRead, RedisTable
from torchembed.stores.volatile.access_refresher import AccessRefresher
from torchembed.stores.volatile.options import VolatileOptions

_SNAPSHOT_ROWS = 1 << 16
_CHECKED_OPTIONS = ("num_partitions", "overflow_policy")
"""Those in which all stores of a table agree."""


class RedisStore:
    """Tables of lines by key (:class:`~torchembed.stores.RowStore`) in Redis, each partition of a
    table of at most ``overflow_margin_rows``. Needs the packages redis and hiredis
    (``pip install 'torchembed[serving]'``).

    Any number of processes share it, with equal ``num_partitions`` and ``overflow_policy``. Of a
    call of ``write`` or ``delete`` each partition's part of a batch of ``max_batch_rows`` is done
    whole or not at all; where a call fails, parts may be done. After each batch a partition with
    too many rows keeps exactly ``overflow_resolution_target`` of them, also where several processes
    find it so. When and how often rows were read is noted by a thread behind the readers, by the
    clock of this machine; :meth:`sync` and :meth:`close` wait for it.

    A server that is away is an error of the calls that need it, in ``timeout_seconds`` or so, and
    none of those once it is back. The store is made whether or not there is a server.

    Args:
        redis: where the Redis is.
        options: how tables are bounded; by default they are not.

    Raises:
        StoreUnavailableError, StoreAccessError, StoreFullError: from every method that asks the
            server, where it is away, refuses the login, or has no room.
    """

    def __init__(
        self, redis: RedisOptions | None = None, options: VolatileOptions | None = None
    ) -> None:
        self.redis_options = redis or RedisOptions()
        self.options = options or VolatileOptions()
        self._nodes = RedisNodes(self.redis_options)
        self._resolver = OverflowResolver(self._nodes, self.options)
        self._refresher: AccessRefresher[RedisRead] = AccessRefresher(
            "torchembed accesses to Redis"
        )
        self._mirrored: RowStore | None = None
        self._is_open = True

    def __str__(self) -> str:
        return f"the store in Redis at {self._nodes.where}"

    @property
    def num_lost_accesses(self) -> int:
        """Keys whose reads were not noted, since the server was away, or too many waited."""
        return self._refresher.num_lost_keys

    @property
    def num_evicted_rows(self) -> int:
        """Rows of all tables that this process evicted from partitions with too many."""
        return self._resolver.num_evicted_rows

    def table(self, name: str, line_bytes: int) -> RedisTable:
        """The table ``name`` with lines of ``line_bytes`` bytes, made if there is none.

        Raises:
            ValueError: if the table has lines of another length.
            RowStoreError: if the store is only read and has no such table.
        """
        check_table(name, line_bytes)
        self._check_open()
        record = {
            "line_bytes": line_bytes,
            "num_partitions": self.options.num_partitions,
            "overflow_policy": self.options.overflow_policy.value,
        }
        field = name.encode()
        put = command(b"HSETNX", REGISTRY, field, json.dumps(record).encode())
        table = RedisTable(self, name, line_bytes, exchange(REGISTRY, put))
        if self.redis_options.layout is RedisLayout.HUGECTR:
            self._check_hugectr_partitions(name)
            return table
        get = command(b"HGET", REGISTRY, field)
        # Asked before it is put, since a server that is full answers that alone.
        made_with = self._nodes.run([exchange(REGISTRY, get)])[0][-1]
        if made_with is None:
            if self.redis_options.is_read_only:
                raise RowStoreError(
                    f"{self} is read-only and has no table {name!r}; write to it elsewhere first"
                )
            made_with = self._nodes.run([exchange(REGISTRY, put, get)])[0][-1]
        self._check_record(name, record, _record(made_with))
        return table

    def tables(self) -> dict[str, int]:
        """The ``line_bytes`` of each table, by its name."""
        self._check_open()
        if self.redis_options.layout is RedisLayout.HUGECTR:
            return self._hugectr_tables()
        ((pairs,),) = self._nodes.run([exchange(REGISTRY, command(b"HGETALL", REGISTRY))])
        records = zip(pairs[::2], pairs[1::2], strict=True)
        return {name.decode(): _record(record)["line_bytes"] for name, record in records}

    def mirror(self, whole: RowStore, records: RowStore | None) -> None:
        """Never give a row from now on that a server kept, or got, in place of a newer one that it
        had acknowledged, as one that was killed and comes back may.

        Each new connection is asked which run of the server it leads to. Where that is another one
        than before, or the server is a master only now, the tables of ``whole`` are emptied there
        first. The first time, rows are taken as they are. A second call does nothing. Servers must
        allow ``INFO``, ``CLIENT ID``, ``CLIENT KILL`` and ``UNLINK``.

        Args:
            whole: a store that has all rows of its tables, so that none is lost.
            records: a store that outlives this process, in which runs are kept for the next one;
                None where what is there when this process begins is taken as it is.

        Raises:
            RowStoreError, OSError: where ``records`` cannot be read.
            ValueError: for a store that is read-only, or mirrors another one.
        """
        if self.redis_options.is_read_only:
            raise ValueError(f"{self} must be writable to mirror another store; it is read-only")
        if self._mirrored is None:
            self._nodes.check_connections(
                ConnectionChecks(KnownServers(records), lambda: self._partitions_of(whole))
            )
            self._mirrored = whole
        elif self._mirrored is not whole:
            raise ValueError(
                f"{self} must mirror one store, and has another one already; make another "
                "RedisStore"
            )

    def sync(self) -> None:
        """Return when all reads before are noted. What survives the end of the server is its own
        affair."""
        self._check_open()
        self._refresher.flush()

    def snapshot(self) -> MemoryStore:
        """A store in this process's memory, of all tables as they are now, which cannot be written.

        What is written or deleted while it is taken may or may not be in it.
        """
        copied = MemoryStore()
        for name, line_bytes in self.tables().items():
            lines = copied.table(name, line_bytes)
            for chunk in self.table(name, line_bytes).chunks(_SNAPSHOT_ROWS):
                lines.write(chunk.keys, chunk.lines)
        copied._is_snapshot = True
        return copied

    def close(self) -> None:
        """Close the connections; the rows stay in Redis."""
        try:
            self._refresher.close()
        finally:
            self._is_open = False
            self._nodes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _partitions_of(self, store: RowStore) -> Iterator[PartitionNames]:
        """The partitions here of all tables that a store has."""
        for table in store.tables():
            for partition in range(self.options.num_partitions):
                yield partition_names(self.redis_options.layout, table, partition)

    def _check_open(self) -> None:
        if not self._is_open:
            raise RowStoreError(f"{self} is closed; make another one")

    def _check_writable(self) -> None:
        self._check_open()
        if self.redis_options.is_read_only:
            raise RowStoreError(f"{self} is read-only; open it with is_read_only=False")

    def _check_record(self, name: str, wanted: dict, made_with: dict) -> None:
        check_same_line(str(self), name, made_with["line_bytes"], wanted["line_bytes"])
        for option in _CHECKED_OPTIONS:
            if made_with[option] != wanted[option]:
                raise ValueError(
                    f"{option} of table {name!r} must be {made_with[option]}, with which it was "
                    f"made in {self}, got {wanted[option]}; give the table another name, or the "
                    "store another Redis"
                )

    def _check_hugectr_partitions(self, name: str) -> None:
        """Raise where there are more partitions than would be read; fewer may be all that have
        rows."""
        num_partitions = self.options.num_partitions
        beyond = partition_names(RedisLayout.HUGECTR, name, num_partitions).values
        if self._nodes.run([exchange(beyond, command(b"EXISTS", beyond))])[0][0]:
            raise ValueError(
                f"num_partitions of table {name!r} in {self} must be more than {num_partitions}, "
                "since it has more; give the number that HugeCTR was given"
            )

    def _hugectr_tables(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for node in self._nodes.nodes():
            cursor = b"0"
            while True:
                scan = command(b"SCAN", cursor, b"MATCH", HUGECTR_TABLES, b"COUNT", 1000)
                cursor, names = self._nodes.run_on(node, scan)
                for values in names:
                    table = hugectr_table(values)
                    if table not in found and (line_bytes := self._line_bytes_in(values)):
                        found[table] = line_bytes
                if cursor == b"0":
                    break
        return dict(sorted(found.items()))

    def _line_bytes_in(self, values: bytes) -> int:
        """The length of one of the lines of a hash; 0 where they are gone by now."""
        ((field,),) = self._nodes.run([exchange(values, command(b"HRANDFIELD", values))])
        if field is None:
            return 0
        return self._nodes.run([exchange(values, command(b"HSTRLEN", values, field))])[0][0]


def _record(text: bytes) -> dict:
    with contextlib.suppress(ValueError, TypeError, LookupError):
        record = json.loads(text)
        if isinstance(record["line_bytes"], int) and record.keys() >= {*_CHECKED_OPTIONS}:
            return record
    raise CorruptStoreError(f"the hash {REGISTRY!r} of Redis has a record {text!r} of others")
