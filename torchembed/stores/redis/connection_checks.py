"""Checks of connections to Redis, so that nothing is read that is older than it should be."""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from torchembed.stores.errors import RowStoreError
from torchembed.stores.redis.commands import command
from torchembed.stores.redis.faults import import_redis
from torchembed.stores.redis.known_servers import KnownServers, Node, state_of
from torchembed.stores.redis.layout import PartitionNames

if TYPE_CHECKING:
    from redis.connection import Connection

_LOG = logging.getLogger(__name__)


class _Peer(NamedTuple):
    """This process, as a server knows it by one connection."""

    run: bytes
    """The server's name of itself from its start to its end."""
    number: int
    """The server's number of the connection."""


class _Checked(NamedTuple):
    peer: _Peer
    epoch: int


class ConnectionChecks:
    """Checks connections before they are used: each new one, and all of them after a fault.

    - A server that was started anew, or is a master only now, may have lost what was acknowledged
      before. Its rows are deleted, but for those of other tables than ``partitions``.
    - A connection that was given up may have sent commands that the server reads later. It is
      ended at the server, too, so that they never follow later ones.

    Args:
        known: the servers whose rows are as they should be.
        partitions: gives the partitions of tables whose rows are all in another store, too.
    """

    def __init__(
        self, known: KnownServers, partitions: Callable[[], Iterable[PartitionNames]]
    ) -> None:
        self._known, self._partitions = known, partitions
        self._lock = threading.Lock()
        """Guards all that follows; not held while servers are asked."""
        self._checked: WeakKeyDictionary[Connection, _Checked] = WeakKeyDictionary()
        self._given_up: dict[Node, set[_Peer]] = {}
        self._epoch = 0
        """How often all connections were to be checked anew."""

    def check(
        self, node: Node, connection: "Connection", nodes: Callable[[], Iterable[Node]]
    ) -> None:
        """Check a connection, unless it is checked. Raises errors of the package redis.

        Args:
            node: where it leads.
            nodes: gives all servers that hold data.

        Raises:
            RowStoreError, OSError: where the record of known servers cannot be written.
        """
        with self._lock:
            epoch, checked = self._epoch, self._checked.get(connection)
            if checked is not None and checked.epoch == epoch:
                return
            given_up = frozenset(self._given_up.get(node, ()))
        server, replication, number = _ask(
            connection,
            command(b"INFO", b"server"),
            command(b"INFO", b"replication"),
            command(b"CLIENT", b"ID"),
        )
        run = _field(server, b"run_id")
        # The numbers of another run are those of others.
        late = [
            command(b"CLIENT", b"KILL", b"ID", peer.number) for peer in given_up if peer.run == run
        ]
        if late:
            _ask(connection, *late)
        # A server that was a replica meanwhile has the rows of its master.
        state = state_of(run, _field(replication, b"master_replid"))
        if not self._known.is_known(node, state, nodes):
            self._empty(node, connection)
        self._known.note(node, state)
        with self._lock:
            self._given_up[node] = self._given_up.get(node, set()) - given_up
            self._checked[connection] = _Checked(_Peer(run, number), epoch)

    def check_all_anew(self) -> None:
        """Have all connections checked before they are used again."""
        with self._lock:
            self._epoch += 1

    def give_up(self, node: Node, connection: "Connection") -> None:
        """Note that a connection is closed, whatever the server has read of it by then."""
        with self._lock:
            checked = self._checked.pop(connection, None)
            if checked is not None:
                self._given_up.setdefault(node, set()).add(checked.peer)
            self._epoch += 1

    def forget(self, connection: "Connection") -> None:
        """Note that a connection is another one than it was."""
        with self._lock:
            self._checked.pop(connection, None)

    def _empty(self, node: Node, connection: "Connection") -> None:
        """Delete the rows that a server has of the partitions."""
        unlinks = [command(b"UNLINK", names.values, names.accesses) for names in self._partitions()]
        errors = import_redis().exceptions
        replies = _replies(connection, unlinks)
        # Other servers of a cluster have the rest.
        others = [r for r in replies if isinstance(r, errors.MovedError)]
        for reply in replies:
            if isinstance(reply, errors.ResponseError) and reply not in others:
                raise reply
        _LOG.warning(
            "the Redis at %s:%d was started anew, or is a master only now; it may have older rows "
            "than were written, and %d partitions were emptied there",
            *node,
            len(replies) - len(others),
        )


def reply_of(connection: "Connection") -> Any:
    """The next reply, which may be an error."""
    try:
        return connection.read_response(disconnect_on_error=False)
    except import_redis().exceptions.ResponseError as error:
        return error


def _replies(connection: "Connection", commands: list[list[bytes | memoryview]]) -> list[Any]:
    parts = [part for parts in commands for part in parts]
    connection.send_packed_command([b"".join(parts)], check_health=False)
    return [reply_of(connection) for _ in commands]


def _ask(connection: "Connection", *commands: list[bytes | memoryview]) -> list[Any]:
    """The replies to commands; raises the first that is an error."""
    replies = _replies(connection, list(commands))
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def _field(info: bytes, name: bytes) -> bytes:
    """A line of a reply to INFO."""
    for line in info.splitlines():
        key, _, value = line.partition(b":")
        if key == name:
            return value
    raise RowStoreError(
        f"a Redis above another store must name its {name.decode()} in INFO, and names none; use "
        "another server"
    )
