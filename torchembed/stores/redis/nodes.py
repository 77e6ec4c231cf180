"""The servers of a Redis, and the connections to them."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torchembed.core.addresses import parse_address
from torchembed.stores.errors import StoreUnavailableError
from torchembed.stores.redis.commands import Exchange, command, exchange
from torchembed.stores.redis.connection_checks import ConnectionChecks, reply_of
from torchembed.stores.redis.faults import faults_named, import_redis
from torchembed.stores.redis.known_servers import Node
from torchembed.stores.redis.options import DEFAULT_PORT, RedisOptions, RedisTls

if TYPE_CHECKING:
    from redis.connection import BlockingConnectionPool, Connection

_MAX_REDIRECTIONS = 5
_SOCKET_READ_BYTES = 1 << 18
_ASKING = b"*1\r\n$6\r\nASKING\r\n"


class RedisNodes:
    """A single server, or those of a cluster.

    Any number of threads may use it at once. Every method but :meth:`close` raises what
    :func:`~torchembed.stores.redis.faults.faults_named` says, within ``timeout_seconds`` of the
    last sign of life of a server.
    """

    def __init__(self, options: RedisOptions) -> None:
        import_redis()
        self.where = ", ".join(options.addresses)
        self._options = options
        self._seeds = [
            parse_address("addresses", address, default_port=DEFAULT_PORT)
            for address in options.addresses
        ]
        self._lock = threading.Lock()
        self._pools: dict[Node, BlockingConnectionPool] = {}
        self._node_of_slot: list[Node | None] | None = None
        """Of a cluster; None where it is to be asked for."""
        self._checks: ConnectionChecks | None = None

    def check_connections(self, checks: ConnectionChecks) -> None:
        """Have connections checked before they are used for data from now on."""
        self._checks = checks

    def run(self, exchanges: Sequence[Exchange]) -> list[list[Any]]:
        """Send all exchanges, then take their replies: a list for each.

        Where one fails, others may have been done.
        """
        replies: list[list[Any]] = [[] for _ in exchanges]
        waiting: list[tuple[int, Node | None]] = [(n, None) for n in range(len(exchanges))]
        with faults_named(self.where):
            for _ in range(_MAX_REDIRECTIONS):
                waiting = self._run_once(exchanges, waiting, replies)
                if not waiting:
                    return replies
        raise StoreUnavailableError(
            f"the Redis at {self.where} is moving its slots about, and sent a command on "
            f"{_MAX_REDIRECTIONS} times"
        )

    def run_on(self, node: Node, parts: list[bytes | memoryview]) -> Any:
        """Send a command to one server; its reply."""
        with faults_named(f"{node[0]}:{node[1]}"):
            replies: list[list[Any]] = [[]]
            self._run_once([exchange(b"", parts)], [(0, node)], replies, is_asking=False)
            return replies[0][0]

    def nodes(self) -> Sequence[Node]:
        """The servers that hold data."""
        with faults_named(self.where):
            return self._masters()

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            pools, self._pools = list(self._pools.values()), {}
        for pool in pools:
            pool.disconnect()

    def _run_once(
        self,
        exchanges: Sequence[Exchange],
        waiting: list[tuple[int, Node | None]],
        replies: list[list[Any]],
        *,
        is_asking: bool = True,
    ) -> list[tuple[int, Node | None]]:
        """Run the exchanges that wait, at a node of their own or at that of their key; those that
        are sent on to others."""
        groups: dict[Node, list[tuple[int, bool]]] = {}
        for n, node in waiting:
            place = self._node_of(exchanges[n].key) if node is None else node
            groups.setdefault(place, []).append((n, is_asking and node is not None))
        try:
            # In one order everywhere, since each waits for connections while it has others.
            with self._connections(sorted(groups)) as connections:
                if self._checks is not None:
                    for node, connection in connections.items():
                        self._checks.check(node, connection, self._masters)
                for node, connection in connections.items():
                    parts: list[bytes | memoryview] = []
                    for n, asks in groups[node]:
                        parts += [_ASKING] * asks + exchanges[n].parts
                    connection.send_packed_command(parts, check_health=False)
                for node, connection in connections.items():
                    for n, asks in groups[node]:
                        num_replies = exchanges[n].num_replies + asks
                        replies[n] = [reply_of(connection) for _ in range(num_replies)][asks:]
        except BaseException:
            # Others may hold its slots by now.
            self._node_of_slot = None
            raise
        return [
            (n, to)
            for group in groups.values()
            for n, _ in group
            for is_sent_on, to in [self._outcome(exchanges[n], replies[n])]
            if is_sent_on
        ]

    def _outcome(self, sent: Exchange, replies: list[Any]) -> tuple[bool, Node | None]:
        """Whether an exchange must be sent again, and to which node but its key's. Raises its first
        error that is another one."""
        errors = import_redis().exceptions
        inner = replies[-1] if sent.is_transaction and isinstance(replies[-1], list) else []
        error = next((r for r in (*replies, *inner) if isinstance(r, errors.ResponseError)), None)
        if error is None:
            return False, None
        if self._options.is_cluster and isinstance(error, errors.AskError):
            if isinstance(error, errors.MovedError):
                self._node_of_slot = None
                return True, None
            return True, (error.host, error.port)
        if isinstance(error, errors.ClusterDownError):
            self._node_of_slot = None
        raise error

    @contextmanager
    def _connections(self, nodes: list[Node]) -> "Iterator[dict[Node, Connection]]":
        connections: dict[Node, Connection] = {}
        try:
            for node in nodes:
                connection = self._pool(node).get_connection()
                connections[node] = cast("Connection", connection)
            yield connections
        except BaseException:
            # Replies that were not taken would be those to later commands.
            for node, connection in connections.items():
                connection.disconnect()
                if self._checks is not None:
                    self._checks.give_up(node, connection)
            raise
        finally:
            for node, connection in connections.items():
                self._pool(node).release(connection)

    def _pool(self, node: Node) -> "BlockingConnectionPool":
        with self._lock:
            if node not in self._pools:
                self._pools[node] = self._made_pool(node)
            return self._pools[node]

    def _made_pool(self, node: Node) -> "BlockingConnectionPool":
        redis, options = import_redis(), self._options
        encryption: dict[str, Any] = {}
        if options.tls is not None:
            encryption = _encryption(options.tls)
        return redis.connection.BlockingConnectionPool(
            max_connections=options.num_connections,
            timeout=options.timeout_seconds,
            host=node[0],
            port=node[1],
            username=options.user_name,
            password=options.password,
            socket_timeout=options.timeout_seconds,
            socket_connect_timeout=options.timeout_seconds,
            socket_keepalive=True,
            socket_read_size=_SOCKET_READ_BYTES,
            redis_connect_func=self._begin,
            # Whoever asked is told at once, and asks again when it wants.
            retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),
            protocol=2,
            **encryption,
        )

    def _begin(self, connection: "Connection") -> None:
        """Log in, by a connection that was just made."""
        if self._checks is not None:
            self._checks.forget(connection)
        connection.on_connect()

    def _masters(self) -> Sequence[Node]:
        if not self._options.is_cluster:
            return self._seeds
        return sorted({node for node in self._slots() if node is not None})

    def _node_of(self, key: bytes) -> Node:
        if not self._options.is_cluster:
            return self._seeds[0]
        slot = import_redis().crc.key_slot(key)
        node = self._slots()[slot]
        if node is None:
            self._node_of_slot = None
            raise StoreUnavailableError(
                f"the Redis at {self.where} has no server for slot {slot}; mend the cluster"
            )
        return node

    def _slots(self) -> list[Node | None]:
        """The server of each slot, as one of the cluster says."""
        slots = self._node_of_slot
        if slots is not None:
            return slots
        redis = import_redis()
        with self._lock:
            known = [*self._pools]
        failure: Exception | None = None
        for node in dict.fromkeys([*known, *self._seeds]):
            try:
                with self._connections([node]) as connections:
                    connections[node].send_packed_command(command(b"CLUSTER", b"SLOTS"))
                    ranges = connections[node].read_response()
            except (redis.exceptions.RedisError, OSError) as error:
                failure = error
                continue
            slots = [None] * redis.crc.REDIS_CLUSTER_HASH_SLOTS
            for first, last, (host, port, *_), *_ in ranges:
                # Without a name it is the one that was asked.
                place = (host.decode() if host else node[0], port)
                slots[first : last + 1] = [place] * (last + 1 - first)
            self._node_of_slot = slots
            if self._checks is not None:
                # Replicas may have become masters.
                self._checks.check_all_anew()
            return slots
        assert failure is not None
        raise failure


def _connections_to(server_name: str | None) -> "type[Connection]":
    """The class of encrypted connections to servers of a name, None for that of their addresses."""
    encrypted = import_redis().connection.SSLConnection
    if server_name is None:
        return encrypted

    class NamedConnection(encrypted):
        """redis-py asks for the certificate of the host that it connects to."""

        def _wrap_socket_with_ssl(self, sock: Any) -> Any:
            address, self.host = self.host, server_name
            try:
                return super()._wrap_socket_with_ssl(sock)
            finally:
                self.host = address

    return NamedConnection


def _encryption(tls: RedisTls) -> dict[str, Any]:
    authorities = tls.ca_certificate
    is_folder = authorities is not None and Path(authorities).is_dir()
    return {
        "connection_class": _connections_to(tls.server_name),
        "ssl_ca_path" if is_folder else "ssl_ca_certs": authorities and str(authorities),
        "ssl_certfile": tls.client_certificate and str(tls.client_certificate),
        "ssl_keyfile": tls.client_key and str(tls.client_key),
        "ssl_check_hostname": tls.checks_host_name,
    }
