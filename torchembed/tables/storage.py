"""Where the rows of a table live: on the device, or elsewhere behind a cache on it."""

import dataclasses
import os
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Keeps a table's rows, with their optimizer state, in the memory of the host, and those that
    batches use in a cache on the device.

    Training reads the rows of a batch before it is trained, and writes rows that make room for
    others back. Tables of one dimension, dtype, optimizer and storage share a cache of all their
    cache rows together. A batch that uses more rows is an error.

    Args:
        cache_rows: rows of the table that its device holds at once; on several ranks each one's.
        cache_bytes: the same in bytes of rows with their optimizer state, if ``cache_rows`` is not
            given.
    """

    cache_rows: int | None = None
    cache_bytes: int | None = None

    def __post_init__(self) -> None:
        _check_size("cache", self.cache_rows, self.cache_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disk:
    """Keeps a table's rows, with their optimizer state, on disk, those of recent batches in the
    memory of the host, and of these some in a cache on the device.

    Args:
        path: a folder for the rows, which one process may use at a time.
        host_rows: rows of the table that the host holds at once; on several ranks each one's.
        host_bytes: the same in bytes of rows with their optimizer state, if ``host_rows`` is not
            given.
        cache_rows, cache_bytes: as for :class:`HostMemory`.
    """

    path: str | os.PathLike[str]
    host_rows: int | None = None
    host_bytes: int | None = None
    cache_rows: int | None = None
    cache_bytes: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        _check_size("host", self.host_rows, self.host_bytes)
        _check_size("cache", self.cache_rows, self.cache_bytes)


Storage = HostMemory | Disk


def check_storage(name: str, storage: object) -> None:
    """Raise ``TypeError`` unless ``storage`` of a table, ``name`` in errors, is one."""
    if storage is not None and not isinstance(storage, Storage):
        raise TypeError(
            f"storage of {name} must be HostMemory(...), Disk(...) or None for the device, "
            f"got {storage!r}"
        )


def _check_size(kind: str, rows: object, num_bytes: object) -> None:
    given = {f"{kind}_rows": rows, f"{kind}_bytes": num_bytes}
    found = {name: value for name, value in given.items() if value is not None}
    if len(found) != 1:
        raise ValueError(
            f"{kind}_rows or {kind}_bytes must be given, and not both, got "
            + ", ".join(f"{name}={value!r}" for name, value in given.items())
        )
    ((name, value),) = found.items()
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be positive, got {value}")
