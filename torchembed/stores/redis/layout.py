"""Names in Redis, and the bytes of keys."""

from typing import NamedTuple

import numpy as np

from torchembed.stores.redis.options import RedisLayout

REGISTRY = b"torchembed_tables"
"""A hash of the tables' records, in JSON, by their names."""

HUGECTR_TABLES = b"hps_et{hps_et.*/p*}v"
"""Pattern of the names of HugeCTR's values."""

KEY_BYTES = 8


class PartitionNames(NamedTuple):
    """Keys of what a partition of a table has in Redis, on one server since their braces agree."""

    values: bytes
    """A hash of lines by the 8 bytes of keys."""
    accesses: bytes
    """A hash of the time in microseconds or the number of accesses, in decimal, by the same."""
    generation: bytes
    """How many of its overflows were resolved."""


def partition_names(layout: RedisLayout, table: str, partition: int) -> PartitionNames:
    """The names of a partition, but for their ends those of HugeCTR's parameter server."""
    if layout is RedisLayout.HUGECTR:
        tag = f"hps_et.{table.replace('/', '.')}"
    else:
        # Braces within the tag would end it.
        tag = table.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
    stem = f"hps_et{{{tag}/p{partition}}}".encode()
    return PartitionNames(stem + b"v", stem + b"t", stem + b"e")


def hugectr_table(values: bytes) -> str:
    """The table whose values have a name that fits :data:`HUGECTR_TABLES`."""
    tag = values.decode().removeprefix("hps_et{hps_et.").rsplit("/p", 1)[0]
    return tag.replace(".", "/", 1)


def key_fields(keys: np.ndarray) -> np.ndarray:
    """Keys as the names of fields: uint8 ``[n, 8]``, little-endian."""
    return keys.astype("<i8").view(np.uint8).reshape(-1, KEY_BYTES)


def keys_of(fields: list[bytes]) -> np.ndarray:
    """Keys by the names of fields."""
    return np.frombuffer(b"".join(fields), dtype="<i8").astype(np.int64)
