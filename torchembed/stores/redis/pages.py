"""All fields of hashes in Redis, page by page, so that the server answers others meanwhile."""

import numpy as np

from torchembed.stores.errors import CorruptStoreError
from torchembed.stores.redis.commands import command, exchange
from torchembed.stores.redis.layout import KEY_BYTES, keys_of
from torchembed.stores.redis.nodes import RedisNodes
from torchembed.stores.redis.scripts import SCAN_FIELDS

_PAGE_FIELDS = 4096


def all_keys(nodes: RedisNodes, hashes: list[bytes]) -> list[np.ndarray]:
    """The keys in each of some hashes, ascending. Those that come and go meanwhile may or may not
    be among them."""
    found: list[list[bytes]] = [[] for _ in hashes]
    cursors = dict.fromkeys(range(len(hashes)), b"0")
    while cursors:
        exchanges = [
            exchange(
                hashes[n],
                command(b"EVAL", SCAN_FIELDS, 1, hashes[n], cursor, _PAGE_FIELDS),
            )
            for n, cursor in cursors.items()
        ]
        replies = nodes.run(exchanges)
        for n, ((cursor, fields),) in zip(list(cursors), replies, strict=True):
            _check_fields(hashes[n], fields)
            found[n] += fields
            cursors[n] = cursor
        cursors = {n: cursor for n, cursor in cursors.items() if cursor != b"0"}
    return [np.unique(keys_of(fields)) for fields in found]


def all_accesses(nodes: RedisNodes, name: bytes) -> tuple[np.ndarray, np.ndarray]:
    """The keys in a hash of accesses, ascending, and their accesses."""
    fields: list[bytes] = []
    accesses: list[bytes] = []
    cursor = b"0"
    while True:
        scan = command(b"HSCAN", name, cursor, b"COUNT", _PAGE_FIELDS)
        (((cursor, page),),) = nodes.run([exchange(name, scan)])
        fields += page[::2]
        accesses += page[1::2]
        if cursor == b"0":
            break
    _check_fields(name, fields)
    # A field may come several times, and is then as it came last.
    keys, last = np.unique(keys_of(fields)[::-1], return_index=True)
    numbers = np.array(accesses[::-1], dtype="S19").astype(np.int64) if accesses else []
    return keys, np.asarray(numbers, dtype=np.int64)[last]


def _check_fields(name: bytes, fields: list[bytes]) -> None:
    others = set(map(len, fields)) - {KEY_BYTES}
    if others:
        raise CorruptStoreError(
            f"keys in the hash {name!r} of Redis must have {KEY_BYTES} bytes, and some have "
            f"{max(others)}; give the store a Redis of its own"
        )
