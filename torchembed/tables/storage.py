"""The memory in which the rows of a table live."""

import dataclasses


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
        given = {"cache_rows": self.cache_rows, "cache_bytes": self.cache_bytes}
        found = {name: value for name, value in given.items() if value is not None}
        if len(found) != 1:
            raise ValueError(
                "cache_rows or cache_bytes must be given, and not both, got "
                + ", ".join(f"{name}={value!r}" for name, value in given.items())
            )
        ((name, value),) = found.items()
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be positive, got {value}")
