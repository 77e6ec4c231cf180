"""Costs of placed tables to ranks, in bytes, by kind."""

import enum
from typing import NamedTuple


class Load(enum.IntEnum):
    """Columns of load arrays: the costs of a shard to the rank that holds it."""

    LOOKUP = 0
    """Bytes through memory in forward; cached ones are weighted by `CACHED_ROW_BYTE`."""
    UPDATE = 1
    """Bytes through memory in backward and in the optimizer's step, weighted likewise."""
    IDS = 2
    """Bytes of ids that each rank sends to it."""
    VECTORS = 3
    """Bytes of vectors that it sends to each rank."""
    GRADIENTS = 4
    """Bytes of gradients, and of their squares where exchanged, that each rank sends to it."""
    HELD = 5
    """Bytes of rows, their optimizer state, and buffers."""
    HOST = 6
    """Bytes of rows in the memory of the node's host, with their optimizer state, and of what finds
    rows on disk."""
    FETCHED = 7
    """Bytes of rows that come from the host to the device; as many go back at the same time."""
    DISK = 8
    """Bytes of rows on the node's disk, with their optimizer state."""
    READ = 9
    """Bytes of rows that come from the disk to the host while as many go back, each with the bytes
    that the disk moves while a processor reads a row and writes one."""


WIRES = slice(Load.IDS, Load.HELD)
"""The columns of load arrays that are exchanged between ranks."""


class Everywhere(NamedTuple):
    """The costs of a table to every rank, independent of who holds it."""

    lookup_bytes: float = 0.0
    update_bytes: float = 0.0
    all_reduce_bytes: float = 0.0
    """Bytes of a replicated table's gradients."""
    held_bytes: float = 0.0

    def plus(self, other: "Everywhere") -> "Everywhere":
        return Everywhere(
            self.lookup_bytes + other.lookup_bytes,
            self.update_bytes + other.update_bytes,
            self.all_reduce_bytes + other.all_reduce_bytes,
            self.held_bytes + other.held_bytes,
        )
