"""Storage choices are checked when they are made."""

import pytest

from torchembed.tables.storage import HostMemory


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
