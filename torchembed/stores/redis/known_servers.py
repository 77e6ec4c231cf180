"""Servers of a Redis whose rows are known to be no older than those of a store below it."""

import hashlib
from collections.abc import Callable, Iterable

import torch

from torchembed.stores.interface import RowStore

Node = tuple[str, int]

_RECORDS = "torchembed.redis_servers"
_STATE_BYTES = 16


class KnownServers:
    """Which state each server was in when it was last known to have no older rows.

    A server that was started anew, or has taken the place of another, is in another state, and may
    lack what was acknowledged before. Any number of threads may use it at once.

    Args:
        records: a store that outlives the process, in which states are kept for the next one; None
            where they are of this process alone.

    Raises:
        RowStoreError, OSError: where ``records`` cannot be read.
    """

    def __init__(self, records: RowStore | None) -> None:
        self._table = None if records is None else records.table(_RECORDS, _STATE_BYTES)
        self._states: dict[int, bytes] = {}
        if self._table is not None:
            for chunk in self._table.chunks(1 << 10):
                states = (bytes(line.tolist()) for line in chunk.lines)
                self._states |= zip(chunk.keys.tolist(), states, strict=True)
        self._is_first_use = not self._states
        self._first: set[Node] | None = None
        """At the first use the servers that were there then, and have not been asked yet."""

    def is_known(self, node: Node, state: bytes, nodes: Callable[[], Iterable[Node]]) -> bool:
        """True where the rows of a server are no older than they should be.

        At the first use, when no server is on record, rows are taken as they are.

        Args:
            node: the server.
            state: 16 bytes that differ from those of other states.
            nodes: gives all servers of now; asked once, at the first use.
        """
        if self._is_first_use and self._first is None:
            self._first = set(nodes())
        if self._first is not None and node in self._first:
            return True
        return self._states.get(_key(node)) == state

    def note(self, node: Node, state: bytes) -> None:
        """Put on record that a server has no older rows, in the state that it is in.

        Raises:
            RowStoreError, OSError: where that cannot be written.
        """
        if self._states.get(_key(node)) == state:
            return
        if self._table is not None:
            line = torch.tensor(list(state), dtype=torch.uint8)
            self._table.write(torch.tensor([_key(node)]), line[None])
        self._states[_key(node)] = state
        if self._first is not None:
            self._first.discard(node)


def state_of(*names: bytes) -> bytes:
    """A state of 16 bytes, by what names it."""
    return hashlib.blake2b(b"\n".join(names), digest_size=_STATE_BYTES).digest()


def _key(node: Node) -> int:
    digest = hashlib.blake2b(f"{node[0]}:{node[1]}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
