"""The choice of a run's tables that live in host memory, behind a cache on the device."""

from collections.abc import Sequence

from torchembed import HostMemory


def check_cached(cached: float | None) -> None:
    """Raise unless ``cached`` is a part above 0, or None."""
    if cached is not None and not 0 < cached <= 1:
        raise ValueError(
            f"cached must be above 0 and at most 1, or left out to keep tables on the device, "
            f"got {cached}"
        )


def storages(
    table_rows: Sequence[int], cached: float | None, batch_size: int
) -> list[HostMemory | None]:
    """The storage of each table: of the large ones, with more rows than two batches have ids of one
    for each sample, host memory behind one cache for the part ``cached`` of all their rows.

    A table gets room for the rows of two batches at least. With None all live on the device.
    """
    check_cached(cached)
    two_batches = 2 * batch_size
    large = sorted(rows for rows in table_rows if rows > two_batches)
    if cached is None or not large:
        return [None] * len(table_rows)
    cache_rows = max(_equal_share(large, cached), two_batches)
    # All alike, since tables with different storages share no cache, lookup and update.
    storage = HostMemory(cache_rows=cache_rows)
    return [storage if rows > two_batches else None for rows in table_rows]


def _equal_share(ascending: Sequence[int], part: float) -> int:
    """Rows of each table, where smaller ones have all of theirs, that make ``part`` of them all."""
    left = part * sum(ascending)
    for number, rows in enumerate(ascending):
        share = left / (len(ascending) - number)
        if share <= rows:
            return round(share)
        left -= rows
    return ascending[-1]
