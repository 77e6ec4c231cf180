"""Paths of data: local ones, and URLs of whatever fsspec reaches."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, Union

from torchembed.core.urls import is_url

if TYPE_CHECKING:
    from typing_extensions import TypeIs
    from upath import UPath

DataPath: TypeAlias = Union[Path, "UPath"]
"""A local path, or one of a URL, which has the same methods."""

_LOCAL = re.compile(r"(?:file|local)://")


def data_path(path: DataPath | str) -> DataPath:
    """``path`` as an object with pathlib's methods.

    A local one is a ``pathlib.Path``, also where it is given as ``file://`` or ``local://``, and
    needs no other package. Any other URL that fsspec knows (``s3://``, ``gs://``, ``hdfs://``,
    ``http://``, ``memory://``, ...) becomes a ``upath.UPath``; fsspec's own settings and those of
    the package for its protocol hold, such as keys and endpoints, and ``UPath(url, **options)``
    passes others. Listings that fsspec has kept of its file system are forgotten.

    Raises:
        ImportError: if a package is missing, which is named.
        ValueError: for a URL of a protocol that fsspec does not know, or one that was made a
            ``Path``, which takes a slash of it.
    """
    if not is_url(path):
        return path if isinstance(path, Path) else Path(str(path))
    text = str(path)
    if local := _LOCAL.match(text):
        return Path(text[local.end() :])
    try:
        from upath import UPath
    except ImportError as error:
        raise ImportError(
            f"{text}: reading a URL needs universal-pathlib; pip install 'torchembed[remote]'"
        ) from error
    try:
        remote = UPath(path)
        remote.fs.invalidate_cache()
    except ValueError as error:
        raise ValueError(
            f"path must be a local path or a URL that fsspec knows, got {text!r} ({error})"
        ) from None
    except ImportError as error:
        raise ImportError(f"{text}: its protocol needs another package ({error})") from error
    return remote


def is_remote(path: DataPath) -> "TypeIs[UPath]":
    """True for paths that only fsspec can open."""
    return not isinstance(path, Path)


class ByteRange(NamedTuple):
    """Bytes ``[start, stop)`` of a file."""

    path: DataPath
    start: int
    stop: int


def read_ranges(ranges: Sequence[ByteRange], *, is_exact: bool = True) -> list[bytes]:
    """The bytes of each range; those behind URLs, all of one file system, are asked for at once.

    Args:
        ranges: all local, or all behind URLs. Each begins within its file.
        is_exact: False where ranges may go past the end of their files, and are cut there.

    Raises:
        ValueError: if other numbers of bytes came.
    """
    if not ranges:
        return []
    first = ranges[0].path
    if is_remote(first):
        paths = [path.path for path, _, _ in ranges if is_remote(path)]
        starts, stops = [r.start for r in ranges], [r.stop for r in ranges]
        parts = first.fs.cat_ranges(paths, starts, stops, on_error="raise")
    else:
        parts = [_read_local(*of_file) for of_file in ranges]
    for (path, start, stop), part in zip(ranges, parts, strict=True):
        if len(part) > stop - start or (is_exact and len(part) < stop - start):
            raise ValueError(
                f"{path}: bytes {start} to {stop} must be {stop - start}, and {len(part)} came; "
                "the file has changed since it was opened, or its server gives no ranges of files"
            )
    return parts


def _read_local(path: DataPath, start: int, stop: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)
