"""Storage choices are checked when they are made."""

from pathlib import Path

import pytest

from torchembed.tables.storage import Disk, HostMemory, check_storage


def test_a_size_is_given_in_rows_or_in_bytes() -> None:
    assert HostMemory(cache_rows=3).cache_bytes is None
    disk = Disk(path="rows", host_bytes=1 << 20, cache_rows=5)
    assert (disk.path, disk.host_rows, disk.cache_rows) == (Path("rows"), None, 5)


def test_refuses_no_size_and_two() -> None:
    with pytest.raises(
        ValueError,
        match="cache_rows or cache_bytes must be given, and not both, got cache_rows=None, "
        "cache_bytes=None",
    ):
        HostMemory()
    with pytest.raises(ValueError, match="got host_rows=1, host_bytes=2"):
        Disk(path="rows", host_rows=1, host_bytes=2, cache_rows=1)


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


def test_refuses_what_is_no_storage() -> None:
    check_storage("table item", None)
    with pytest.raises(
        TypeError,
        match=r"storage of table item must be HostMemory\(\.\.\.\), Disk\(\.\.\.\) or None for the "
        "device, got 'host'",
    ):
        check_storage("table item", "host")
