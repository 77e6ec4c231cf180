"""Lookups for repositories of tests: a cache on the CPU over a store of the test's."""

from collections.abc import Mapping

from torchembed.serving.levels import EmbeddingCache, LeveledLookup, RowLevels, ServedTable
from torchembed.serving.models import LookupFactory, ModelOptions
from torchembed.stores import RowStore


def lookups_over(store: RowStore, num_cached_rows: int = 10_000) -> LookupFactory:
    """Makes lookups that wait for missing rows, over one store."""

    def make(tables: Mapping[ServedTable, int]) -> LeveledLookup:
        served = list(tables)
        cache = EmbeddingCache(served, num_rows=num_cached_rows)
        return LeveledLookup(cache, RowLevels([store], served), hit_rate_threshold=2.0)

    return make


def options_over(store: RowStore, **options: object) -> ModelOptions:
    """Options of models whose rows are in ``store``."""
    return ModelOptions(make_lookup=lookups_over(store), **options)  # type: ignore[arg-type]
