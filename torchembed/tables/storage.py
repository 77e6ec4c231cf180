"""The memory in which the rows of a table live."""

import dataclasses
import os


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Keeps a table's rows and their optimizer state in host memory, behind a cache on the device.

    Training brings the rows of a batch into the cache before their step, and writes rows that make
    room for them back. Tables of the same dimension, dtype and optimizer share one cache, whose
    size is the sum of theirs. A batch that uses more rows raises a ``RuntimeError``.

    Args:
        cache_rows: size of the cache in rows, for each table and on each rank.
        cache_bytes: the same in bytes of rows with their optimizer state. Give one of the two.

    Raises:
        TypeError, ValueError: unless exactly one size is given, a positive int.
    """

    cache_rows: int | None = None
    cache_bytes: int | None = None

    def __post_init__(self) -> None:
        _check_size(cache_rows=self.cache_rows, cache_bytes=self.cache_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disk:
    """Keeps a table's rows and their optimizer state on disk, behind host memory and a cache.

    Host memory holds the rows that were used recently, and the cache on the device those that
    batches use; every row of the cache is in host memory, too. Training brings the rows of a batch
    up before their step, and writes rows that make room for them back. Tables of the same
    dimension, dtype, optimizer and storage share the cache and the host memory, whose sizes are the
    sums of theirs. A batch that uses more rows than either has room for raises a ``RuntimeError``.

    Needs the package rocksdict (``pip install 'torchembed[disk]'``). Rows that were never trained
    are not on disk: they have the values of the table's initializer. The files belong to one run;
    only checkpoints outlive it.

    Args:
        path: a folder, which is made if its parent exists. Each process has a folder of its own in
            it, from which the remains of a former run are removed.
        host_rows: size of the host memory in rows, for each table and on each rank: at least
            ``cache_rows`` and the rows of a batch, or all rows of the table.
        host_bytes: the same in bytes of rows with their optimizer state. Give one of the two.
        cache_rows, cache_bytes: size of the cache, as for :class:`HostMemory`.

    Raises:
        TypeError, ValueError: for a ``path`` that is no path, sizes that are not given exactly
            once, or less host memory than cache.
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
