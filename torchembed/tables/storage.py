"""The memory in which the rows of a table live."""

import dataclasses
import os


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Keeps a table's rows, with their optimizer state, in the memory of the host, and those that
    batches use in a cache on the device.

    Training reads the rows of a batch before it is trained, and writes rows that make room for
    others back. Tables of one dimension, dtype and optimizer share a cache of all their cache rows
    together, whatever the size of each one's. A batch that uses more rows is an error.

    Args:
        cache_rows: rows of the table that its device holds at once; on several ranks each one's.
        cache_bytes: the same in bytes of rows with their optimizer state, if ``cache_rows`` is not
            given.
    """

    cache_rows: int | None = None
    cache_bytes: int | None = None

    def __post_init__(self) -> None:
        _check_size(cache_rows=self.cache_rows, cache_bytes=self.cache_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disk:
    """Keeps a table's rows, with their optimizer state, in a database on disk, those that were used
    lately in the memory of the host, and those that batches use in a cache on the device.

    Needs the package rocksdict (``pip install 'torchembed[disk]'``). Rows that were never trained
    are on no disk: they have the values that the table's initializer gives them. Training reads the
    rows of a batch before it is trained, and writes rows that make room for others back. Tables of
    one dimension, dtype, optimizer and storage share a cache of all their cache rows together, and
    memory of all their host rows. The rows that are in the cache are in host memory, too, beside
    all rows of a batch; a batch that uses more rows than either has room for is an error.

    What is in the folder is of one run, and survives it only in checkpoints.

    Args:
        path: a folder, made where there is none in a folder that exists. Each process keeps its
            rows in a folder of its own in it; what a former run left in that is removed.
        host_rows: rows of the table that the memory of the host holds at once; on several ranks
            each one's. More than ``cache_rows`` by the rows of a batch, or all rows of the table.
        host_bytes: the same in bytes of rows with their optimizer state, if ``host_rows`` is not
            given; likewise more than ``cache_bytes``.
        cache_rows, cache_bytes: of the cache, as of :class:`HostMemory`.
    """

    path: str | os.PathLike[str]
    host_rows: int | None = None
    host_bytes: int | None = None
    cache_rows: int | None = None
    cache_bytes: int | None = None

    def __post_init__(self) -> None:
        path = self.path
        if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
            raise TypeError(f"path must be a str or a path, got {path!r}")
        if not os.fspath(path):
            raise ValueError("path must not be empty; give a folder, or '.'")
        # So that paths of several types, as of a plan that was read from JSON, are equal.
        object.__setattr__(self, "path", os.fspath(path))
        _check_size(host_rows=self.host_rows, host_bytes=self.host_bytes)
        _check_size(cache_rows=self.cache_rows, cache_bytes=self.cache_bytes)
        _check_not_fewer(host_rows=self.host_rows, cache_rows=self.cache_rows)
        _check_not_fewer(host_bytes=self.host_bytes, cache_bytes=self.cache_bytes)


Storage = HostMemory | Disk
"""A storage of rows elsewhere than on the device."""


def rows_held(rows: int | None, num_bytes: int | None, *, num_rows: int, line_bytes: int) -> int:
    """The rows, at most ``num_rows``, that a size is of.

    Args:
        rows: the size; None where it is given as ``num_bytes``, which is of one row at least.
        line_bytes: of a row with its optimizer state.
    """
    if rows is None:
        assert num_bytes is not None
        rows = max(num_bytes // line_bytes, 1)
    return min(rows, num_rows)


def _check_size(**given: int | None) -> None:
    """Raise unless one of two sizes is given, a positive int."""
    found = {name: value for name, value in given.items() if value is not None}
    if len(found) != 1:
        raise ValueError(
            f"{' or '.join(given)} must be given, and not both, got "
            + ", ".join(f"{name}={value!r}" for name, value in given.items())
        )
    ((name, value),) = found.items()
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be positive, got {value}")


def _check_not_fewer(**given: int | None) -> None:
    """Raise where the first of two sizes, of host memory, is less than the second, of the cache."""
    (host_name, host), (cache_name, cache) = given.items()
    if host is not None and cache is not None and host < cache:
        raise ValueError(
            f"{host_name} must be at least {cache_name}, since host memory holds the rows of the "
            f"cache too, got {host_name}={host} and {cache_name}={cache}; give it more, or the "
            "cache less"
        )
