"""Rows that a cache lacks, from the levels below it."""

from typing import NamedTuple

from torch import Tensor

from torchembed.ops.hash_table import hash_keys
from torchembed.serving.levels.embedding_cache import EmbeddingCache
from torchembed.serving.levels.lookup_statistics import Count, LookupTotals, Stage
from torchembed.serving.levels.row_levels import ReadLines, RowLevels

_REFRESHED_ROWS = 1 << 14
"""Rows that are refreshed at a time, while nothing is looked up."""
_READ_ROWS = 1 << 18
"""Rows of a whole table that are read at a time."""


class FetchedRows(NamedTuple):
    """The rows of the missing ids of one table."""

    table: int
    """Its place in the cache."""
    positions: Tensor
    """int64 ``[m]``: the places of its ids in the batch, on the cache's device."""
    rows: Tensor
    """float32 ``[m, dim]``: the table's default where no level has a row; likewise."""
    is_found: Tensor
    """bool ``[m]``, likewise."""
    num_default: int
    """How many of them are not."""


class _Distinct(NamedTuple):
    """The distinct ones among the missing ids of one table, on the CPU."""

    table: int
    positions: Tensor
    keys: Tensor
    places: Tensor
    """The place of each id in ``keys``."""


def num_distinct(keys: Tensor, tables: Tensor) -> int:
    """The number of distinct ids, but for one of ``2**64`` pairs of them that counts as one; waits
    for the device.

    Args:
        keys: int64 ``[L]``.
        tables: int32 ``[L]``: -1 where there is no id.
    """
    is_id = tables >= 0
    # The hash of a key is a bijection, and so is that of a table's number.
    return hash_keys(keys[is_id] ^ hash_keys(tables[is_id].long())).unique().numel()


class MissingRows:
    """Reads rows that a cache lacks from the levels, and inserts them into it.

    Args:
        cache: that lacks them.
        levels: that may have them.
        totals: in which they are counted.
    """

    def __init__(self, cache: EmbeddingCache, levels: RowLevels, totals: LookupTotals) -> None:
        self._cache, self._levels, self._totals = cache, levels, totals

    def fetch(self, keys: Tensor, tables: Tensor, is_missing: Tensor) -> list[FetchedRows]:
        """The rows of those of ``keys [L]`` of ``tables [L]`` that are missing, by their table.
        Those that no update came between are in the cache from then on. Waits for the device."""
        totals = self._totals
        with totals.timed(Stage.DEDUP):
            found = self._distinct(keys, tables, is_missing)
        with self._levels.fetching() as fetch:
            reads: list[tuple[_Distinct, ReadLines]] = []
            with totals.timed(Stage.LEVELS):
                for ids in found:
                    name = self._cache.tables[ids.table].name
                    reads.append((ids, self._levels.read(name, ids.keys)))
            with totals.timed(Stage.INSERT), self._cache.access.writing():
                for ids, read in reads:
                    name = self._cache.tables[ids.table].name
                    chosen = read.is_found & self._levels.are_current(fetch, name, ids.keys)
                    if chosen.any():
                        self._cache.insert(ids.table, ids.keys[chosen], read.lines[chosen])
        with totals.timed(Stage.MERGE):
            return [self._rows(ids, read) for ids, read in reads]

    def refresh(self, table: int, keys: Tensor) -> None:
        """Read the rows of ``keys``, int64 ``[n]`` on the CPU, again from the levels; those that
        none has leave the cache, unless one is away."""
        name = self._cache.tables[table].name
        for some in keys.split(_REFRESHED_ROWS):
            with self._levels.fetching() as fetch:
                read = self._levels.read(name, some)
                with self._cache.access.writing():
                    is_current = self._levels.are_current(fetch, name, some)
                    has_row = read.is_found & is_current
                    self._cache.update(table, some[has_row], read.lines[has_row])
                    if read.is_complete:
                        self._cache.erase(table, some[~read.is_found & is_current])

    def read_all(self, table: int) -> None:
        """Insert all rows of a table that the lowest level has.

        Raises:
            RowStoreError, OSError: where it cannot be read.
        """
        name = self._cache.tables[table].name
        with self._levels.fetching() as fetch:
            for chunk in self._levels.chunks(name, _READ_ROWS):
                with self._cache.access.writing():
                    is_current = self._levels.are_current(fetch, name, chunk.keys)
                    self._cache.insert(table, chunk.keys[is_current], chunk.lines[is_current])

    def _distinct(self, keys: Tensor, tables: Tensor, is_missing: Tensor) -> list[_Distinct]:
        positions = is_missing.nonzero().flatten()
        missing_keys, missing_tables = keys[positions].cpu(), tables[positions].cpu()
        positions = positions.cpu()
        found: list[_Distinct] = []
        for table in missing_tables.unique().tolist():
            of_table = missing_tables == table
            unique_keys, places = missing_keys[of_table].unique(return_inverse=True)
            found.append(_Distinct(table, positions[of_table], unique_keys, places))
            self._totals.add(Count.UNIQUE_MISSES, unique_keys.numel())
        return found

    def _rows(self, ids: _Distinct, read: ReadLines) -> FetchedRows:
        served = self._cache.tables[ids.table]
        num_lacking = int((~read.is_found).sum())
        self._totals.add(
            Count.ABSENT_ROWS if read.is_complete else Count.UNREADABLE_ROWS, num_lacking
        )
        device, is_found = self._cache.device, read.is_found[ids.places]
        rows = served.row_format.decode(read.lines.to(device), served.dim)
        rows = rows.masked_fill_(~read.is_found.to(device)[:, None], served.default)
        return FetchedRows(
            table=ids.table,
            positions=ids.positions.to(device),
            rows=rows[ids.places.to(device)],
            is_found=is_found.to(device),
            num_default=int((~is_found).sum()),
        )
