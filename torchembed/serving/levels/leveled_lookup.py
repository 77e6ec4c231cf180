"""Lookups through the cache and the levels below it."""

from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Self

import torch
from torch import Tensor

from torchembed.core import checks
from torchembed.core.features import SparseFeatures
from torchembed.serving.levels.captured_lookups import CapturedLookups, CapturedRows
from torchembed.serving.levels.embedding_cache import CacheKind, EmbeddingCache, FoundRows
from torchembed.serving.levels.feature_plan import FeaturePlan, num_of_samples
from torchembed.serving.levels.feature_pooling import pool_cached, pool_rows
from torchembed.serving.levels.level_rules import LoadedPart
from torchembed.serving.levels.lookup_statistics import (
    Count,
    LookupStatistics,
    LookupTotals,
    Stage,
)
from torchembed.serving.levels.missing_rows import FetchedRows, MissingRows, num_distinct
from torchembed.serving.levels.row_levels import RowLevels
from torchembed.serving.levels.served_table import ServedFeature, positions_of
from torchembed.serving.levels.work_behind import WorkBehind
from torchembed.stores.last_places import last_places


class LookedUpRows(NamedTuple):
    """Answer of :meth:`LeveledLookup.look_up`."""

    rows: Tensor
    """float32 ``[L, D]``."""
    is_default: Tensor
    """bool ``[L]``: True for ids that were answered by their table's default row."""


class PooledFeatures(NamedTuple):
    """Answer of :meth:`LeveledLookup.pooled`."""

    vectors: dict[str, Tensor]
    """For each feature float32 ``[B, D]``, or where it is not pooled ``[ids of the feature, D]``.
    """
    num_default_rows: Tensor
    """int32 ``[B]``: how many ids of each sample were answered by their table's default row."""


class LeveledLookup:
    """Looks up rows in a cache, and those that it lacks in the levels below.

    Where the share of a lookup's distinct ids that are cached reaches ``hit_rate_threshold``, ids
    that are not are answered by their table's default row at once, and a thread inserts their rows
    behind; below it the lookup waits for the levels. Every answer says which ids got default rows,
    those without a row in any level among them. Lookups and changes may come from any number of
    threads at once, and no row is ever read while it is written.

    Args:
        cache: may be shared with others that have the same ``levels``.
        levels: below it; None for a static cache, which has none.
        hit_rate_threshold: above 1 every lookup that misses ids waits for them. At 0 none does,
            and none waits for a GPU either.

    Raises:
        ValueError: for tables that levels lack, or have in another form; for levels below a static
            cache, and for none below another one.
    """

    def __init__(
        self,
        cache: EmbeddingCache,
        levels: RowLevels | None,
        *,
        hit_rate_threshold: float = 0.9,
    ) -> None:
        if not hit_rate_threshold >= 0:
            raise ValueError(
                f"hit_rate_threshold must not be negative, got {hit_rate_threshold}; above 1 every "
                "lookup waits for missing rows"
            )
        if (levels is None) != (cache.kind is CacheKind.STATIC):
            raise ValueError(
                "levels must be None for a static cache, which holds whole tables, and for no "
                f"other, got {levels} for {cache.kind}"
            )
        unequal = []
        if levels is not None:
            unequal = sorted(table.name for table in set(cache.tables).difference(levels.tables))
        if unequal:
            raise ValueError(
                f"levels must have the cache's tables {unequal} in the same form; make both of one "
                "list of tables"
            )
        self.cache, self.levels = cache, levels
        self._threshold = hit_rate_threshold
        self._plans: dict[tuple[tuple[str, ...], tuple[ServedFeature, ...]], FeaturePlan] = {}
        self._totals = LookupTotals()
        self._missing = None if levels is None else MissingRows(cache, levels, self._totals)
        self._behind = WorkBehind(cache, self._missing, self._totals)
        self._captured: CapturedLookups | None = None
        if self.is_capturable and cache.device.type == "cuda":
            self._captured = CapturedLookups(cache)

    @property
    def is_capturable(self) -> bool:
        """True where lookups may be replayed as CUDA graphs. Others wait for no GPU, have their
        rows moved behind, or are of several GPUs."""
        is_awaited = self.cache.kind is CacheKind.DYNAMIC and self._threshold > 0
        return is_awaited and len(self.cache.devices) == 1

    def look_up(self, keys: Tensor, tables: Tensor) -> LookedUpRows:
        """Look up one row for each id.

        Args:
            keys: int64 ``[L]``, any integers.
            tables: int32 ``[L]``: the place of each id's table among the cache's; -1 where there is
                no id.

        Returns:
            On the cache's device. D is the greatest dim of the tables; narrower rows end in zeros.

        Raises:
            TypeError, ValueError: for another dtype or shape.
        """
        checks.check_dtype("keys", keys, (torch.int64,), "call .long()")
        checks.check_dim("keys", keys, 1)
        checks.check_dtype("tables", tables, (torch.int32,), "call .int()")
        checks.check_numel("tables", tables, keys.numel(), "as keys has")
        self.count(keys.numel())
        captured = None
        if self._captured is not None:
            with self._totals.timed(Stage.CACHE):
                captured = self._captured.look_up(keys, tables)
            if captured is not None and not captured.num_missing:
                return LookedUpRows(captured.rows, captured.is_missing)
        return self._look_up_in_levels(keys, tables, captured)

    @torch.no_grad()
    def pooled(
        self,
        features: SparseFeatures,
        served: Sequence[ServedFeature],
        *,
        is_use: bool = True,
    ) -> PooledFeatures:
        """Look up and pool features.

        Sums are float32, in the order of the ids; a mean is divided by the number of a bag's ids,
        and an empty bag gives zeros. ``features.weights`` are factors of each id's row.

        Args:
            features: B samples, on any device.
            served: the features that are looked up, each with its table and pooling.
            is_use: False where the cache has noted their use already: after a
                :class:`CachedPooling` that missed some.

        Returns:
            On the cache's device.

        Raises:
            ValueError: for features that are lacking, or tables that are not served.
        """
        features, order = features.to(self.cache.device), (features.keys, tuple(served))
        plan = self._plans.get(order)
        if plan is None:
            plan = self._plans[order] = FeaturePlan(self.cache, features.keys, served)
        keys, places = features.values.long(), plan.tables_of(features)
        self.count(keys.numel())
        with self._totals.timed(Stage.CACHE), self.cache.access.reading():
            found = self.cache.find(keys, places, is_use=is_use, reads=plan.reads(features))
            vectors = pool_cached(features, plan, self.cache, found)
        fetched, is_default = self._settle(keys, places, found), found.is_missing
        if fetched:
            vectors, is_default = self._pool_fetched(features, plan, keys, places, fetched)
        return PooledFeatures(vectors, num_of_samples(features, is_default))

    def apply_rows(
        self,
        table: str,
        keys: Tensor,
        rows: Tensor,
        deleted_keys: Tensor | None = None,
    ) -> None:
        """Write rows in all levels, and in the cache where they are cached, then delete others
        likewise. Lookups that begin after the return see them. A cache of whole tables gets rows
        that it lacks, too.

        Args:
            table: name of one of the cache's tables.
            keys: int64 ``[n]``; of one that comes several times the last row counts.
            rows: floating ``[n, D]``.
            deleted_keys: int64 ``[m]``; those without a row are left alone.

        Raises:
            TypeError, ValueError: for another table, dtype or shape, or a static cache.
            RowStoreError, OSError: where the lowest level cannot be written; calling again does no
                harm.
        """
        place = positions_of([table], self.cache.tables)[0]
        levels = self.levels
        if levels is None:
            raise ValueError(
                f"table {table!r} must be in a cache that takes updates, got a static one; make "
                "the cache with CacheKind.DYNAMIC or CacheKind.UVM"
            )
        keys, lines = self._lines(place, keys, rows)
        deleted = keys[:0] if deleted_keys is None else deleted_keys.cpu()
        # Before rows are written: what is refused is not done in part.
        checks.check_dtype("deleted_keys", deleted, (torch.int64,), "call .long()")
        checks.check_dim("deleted_keys", deleted, 1)
        with levels.updating(table, torch.cat([keys, deleted])):
            levels.write_lines(table, keys, lines.cpu())
            last = last_places(keys.numpy())
            keys, lines = keys[last], lines[last]
            with self.cache.access.writing():
                self._write(place, keys, lines)
            levels.delete(table, deleted)
            with self.cache.access.writing():
                self.cache.erase(place, deleted)
        self._totals.add(Count.UPDATED_ROWS, len(keys))
        self._totals.add(Count.DELETED_ROWS, len(deleted))

    def load_rows(self, table: str, keys: Tensor, rows: Tensor, part: LoadedPart) -> None:
        """Write rows of a table that is being loaded, into each level those within its initial
        share, and in the cache where they are cached, or where it holds whole tables. Lookups that
        begin after the return see them.

        Args:
            table: name of one of the cache's tables.
            keys: int64 ``[n]``, each once.
            rows: floating ``[n, D]``.
            part: which rows of the table they are.

        Raises:
            TypeError, ValueError: for another table, dtype or shape; where a static cache has
                another row of a key, or no room.
            RowStoreError, OSError: as :meth:`apply_rows`.
        """
        place = positions_of([table], self.cache.tables)[0]
        keys, lines = self._lines(place, keys, rows)
        if self.levels is None:
            with self.cache.access.writing():
                self.cache.load(place, keys, lines)
            return
        with self.levels.updating(table, keys):
            self.levels.load_lines(table, keys, lines.cpu(), part)
            with self.cache.access.writing():
                self._write(place, keys, lines)

    def read_all(self, table: str) -> None:
        """Read the rows of a table from the lowest level into a cache that holds whole tables; a
        dynamic one reads them as they are missed.

        Raises:
            ValueError: for another table.
            RowStoreError, OSError: where the level cannot be read.
        """
        if self._missing is not None and self.cache.kind is CacheKind.UVM:
            self._missing.read_all(positions_of([table], self.cache.tables)[0])

    def refresh(self, share: float) -> int:
        """Read a share of the cached rows again from the levels, going around all of them from call
        to call; returns how many were read. Rows that no level has any more leave the cache, unless
        a level is away. One thread at a time; waits for the devices.

        Args:
            share: in (0, 1].

        Raises:
            ValueError: for another share, or a static cache.
        """
        if not 0 < share <= 1:
            raise ValueError(f"share must be in (0, 1], got {share}")
        missing = self._missing
        if missing is None:
            raise ValueError("a static cache is not refreshed; make it with CacheKind.DYNAMIC")
        with self.cache.access.reading():
            chosen = self.cache.next_keys(share)
        for place, keys in chosen:
            missing.refresh(place, keys)
        num_rows = sum(len(keys) for _, keys in chosen)
        self._totals.add(Count.REFRESHED_ROWS, num_rows)
        return num_rows

    def count(self, num_ids: int) -> None:
        """Count a lookup, which a :class:`CachedPooling` may have answered."""
        self._totals.add(Count.LOOKUPS)
        self._totals.add(Count.REQUESTED, num_ids)

    def wait_for_insertions(self) -> None:
        """Return when the rows that lookups have missed by now are inserted."""
        self._behind.wait()

    def statistics(self) -> LookupStatistics:
        """The totals of now; waits for the devices."""
        with self.cache.access.reading():
            tables = self.cache.counts()
        levels = () if self.levels is None else self.levels.statistics()
        return self._totals.statistics(tables, levels)

    def close(self) -> None:
        """Insert what waits to be inserted, and end the thread that does it. Cache and levels are
        the caller's."""
        self._behind.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _lines(self, place: int, keys: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """``keys``, on the CPU, and lines of ``rows``."""
        served = self.cache.tables[place]
        checks.check_float("rows", rows)
        checks.check_shape("rows", rows, (len(keys), served.dim), "number of keys, dim")
        return keys.cpu(), served.row_format.encode(rows)

    def _write(self, place: int, keys: Tensor, lines: Tensor) -> None:
        """Write rows in the cache that it is to have."""
        if self.cache.kind is CacheKind.UVM:
            self.cache.insert(place, keys, lines)
        else:
            self.cache.update(place, keys, lines)

    @torch.no_grad()
    def _look_up_in_levels(
        self, keys: Tensor, tables: Tensor, captured: CapturedRows | None
    ) -> LookedUpRows:
        """The answer of :meth:`look_up`, after what the cache has given to it, if it was asked."""
        device = self.cache.device
        keys, places = keys.to(device), tables.to(device)
        if captured is None:
            with self._totals.timed(Stage.CACHE), self.cache.access.reading():
                rows, is_default, _, found = self.cache.look_up(keys, places)
        else:
            rows, is_default, num_missing = captured
            found = FoundRows((), is_default, torch.tensor([num_missing]))
        for part in self._settle(keys, places, found):
            dim = part.rows.shape[1]
            rows[part.positions, :dim] = part.rows
            is_default = is_default.index_copy(0, part.positions, ~part.is_found)
        return LookedUpRows(rows, is_default)

    def _settle(self, keys: Tensor, tables: Tensor, found: FoundRows) -> list[FetchedRows]:
        """What the answer to ids that were not cached is to have beside default rows; of others
        nothing is needed, or they are inserted behind."""
        totals, missing = self._totals, self._missing
        if self.cache.kind is CacheKind.UVM:
            self._behind.keep(found)
        if self.cache.device.type == "cuda" and (missing is None or self._threshold == 0):
            self._behind.insert(keys, tables, found, is_counted=False)
            return []
        with totals.timed(Stage.DEDUP):
            num_missing = int(found.num_missing)
            if not num_missing:
                return []
            totals.add(Count.MISSES, num_missing)
            num_unique = num_distinct(keys, tables)
            totals.add(Count.UNIQUE, num_unique)
            num_lacking = num_distinct(keys, tables.masked_fill(~found.is_missing, -1))
        if missing is None or 1 - num_lacking / num_unique >= self._threshold:
            totals.add(Count.DEFAULTS, num_missing)
            self._behind.insert(keys, tables, found, is_counted=True)
            return []
        totals.add(Count.SYNCHRONOUS_LOOKUPS)
        fetched = missing.fetch(keys, tables, found.is_missing)
        totals.add(Count.DEFAULTS, sum(part.num_default for part in fetched))
        return fetched

    def _pool_fetched(
        self,
        features: SparseFeatures,
        plan: FeaturePlan,
        keys: Tensor,
        tables: Tensor,
        fetched: list[FetchedRows],
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The vectors of each feature, and which ids have default rows, where ``fetched`` has the
        rows that were missing."""
        missing, cache = self._missing, self.cache
        assert missing is not None
        is_fetched = torch.zeros_like(keys, dtype=torch.bool)
        left, rows = fetched, dict[int, Tensor]()
        while left:
            for part in left:
                is_fetched[part.positions] = True
            with cache.access.reading():
                found = cache.find(keys, tables, is_use=False, reads=True)
                rows = {
                    planned.group: cache.read(found, planned.group) for planned in plan.poolings
                }
            # Others may have been evicted since they were found.
            left = missing.fetch(keys, tables, found.is_missing & ~is_fetched)
            fetched = fetched + left
        is_default = torch.zeros_like(is_fetched)
        for part in fetched:
            rows[cache.group_of[part.table]][part.positions] = part.rows
            is_default[part.positions] = ~part.is_found
        return pool_rows(features, plan, rows), is_default
