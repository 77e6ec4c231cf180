"""Storage choices are checked when they are made."""

from pathlib import Path

import pytest

from torchembed.tables.storage import Disk, HostMemory


def test_a_size_is_given_in_rows_or_in_bytes() -> None:
    assert HostMemory(cache_rows=3).cache_bytes is None
    assert HostMemory(cache_bytes=1 << 20).cache_rows is None


def test_refuses_no_size_and_two() -> None:
    with pytest.raises(
        ValueError,
        match="cache_rows or cache_bytes must be given, and not both, got cache_rows=None, "
        "cache_bytes=None",
    ):
        HostMemory()
    with pytest.raises(ValueError, match="got cache_rows=1, cache_bytes=2"):
        HostMemory(cache_rows=1, cache_bytes=2)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ValueError, "cache_rows must be positive, got 0"),
        (1.5, TypeError, "cache_rows must be an int, got 1.5"),
        (True, TypeError, "cache_rows must be an int, got True"),
    ],
)
def test_refuses_sizes_that_are_none(value: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        HostMemory(cache_rows=value)  # type: ignore[arg-type]


def test_disk_has_two_sizes_and_a_path_of_any_type() -> None:
    disk = Disk(path="rows", host_rows=4, cache_rows=3)
    assert disk == Disk(path=Path("rows"), host_rows=4, cache_rows=3)
    assert hash(disk) == hash(Disk(path=Path("rows"), host_rows=4, cache_rows=3))
    assert disk.path == "rows"
    assert Disk(path="rows", host_bytes=1 << 20, cache_rows=3).host_rows is None


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"path": 3}, TypeError, "path must be a str or a path, got 3"),
        ({"path": b"rows"}, TypeError, "path must be a str or a path, got b'rows'"),
        ({"path": ""}, ValueError, "path must not be empty; give a folder, or '.'"),
        (
            {"host_rows": None},
            ValueError,
            "host_rows or host_bytes must be given, and not both, got host_rows=None, host_byt",
        ),
        ({"cache_bytes": 4}, ValueError, "not both, got cache_rows=3, cache_bytes=4"),
        ({"host_rows": 0}, ValueError, "host_rows must be positive, got 0"),
        ({"host_rows": 4.0}, TypeError, "host_rows must be an int, got 4.0"),
        (
            {"host_rows": 2},
            ValueError,
            "host_rows must be at least cache_rows, .* got host_rows=2 and cache_rows=3; give it",
        ),
        (
            {"host_rows": None, "host_bytes": 2, "cache_rows": None, "cache_bytes": 3},
            ValueError,
            "host_bytes must be at least cache_bytes.* got host_bytes=2 and cache_bytes=3",
        ),
    ],
)
def test_refuses_disks_that_are_none(
    given: dict[str, object], error: type[Exception], message: str
) -> None:
    settings: dict[str, object] = {"path": "rows", "host_rows": 4, "cache_rows": 3}
    with pytest.raises(error, match=message):
        Disk(**settings | given)  # type: ignore[arg-type]
