"""The caches and lookups of models, as a configuration says."""

from collections.abc import Mapping

import torch

from torchembed.serving.configuration import CacheConfig, ModelConfig, RowsOf
from torchembed.serving.levels import (
    CacheKind,
    EmbeddingCache,
    LeveledLookup,
    RowLevels,
    ServedTable,
)
from torchembed.serving.models import BatchOptions, LookupFactory, ModelOptions
from torchembed.serving.server.stores import StoreStack


def model_options(config: ModelConfig, stack: StoreStack) -> ModelOptions:
    """The options of a model over the stores of its server."""
    return ModelOptions(
        make_lookup=_lookups(config, stack),
        row_bytes=stack.row_bytes,
        device=torch.device(_devices(config.cache)[0]),
        captured_sizes=config.captured_sizes,
        row_format=config.cache.row_format,
        defaults=config.default_values,
        hugectr_folders={t: rows.folders for t, rows in config.hugectr_rows.items()},
        num_latest_versions=config.num_latest_versions,
        versions=config.versions,
        batching=_batching(config),
        # Rows of a static cache never change, so that those of another version are others.
        rows_by_version=config.rows is RowsOf.VERSION or config.cache.kind is CacheKind.STATIC,
    )


def _batching(config: ModelConfig) -> BatchOptions | None:
    if config.batching is None:
        return None
    return BatchOptions(
        max_samples=config.batching.max_samples,
        max_delay_seconds=config.batching.max_delay_microseconds * 1e-6,
        max_waiting_requests=config.batching.max_waiting_requests,
        num_instances=config.num_instances,
    )


def _lookups(config: ModelConfig, stack: StoreStack) -> LookupFactory:
    def make(tables: Mapping[ServedTable, int]) -> LeveledLookup:
        served, caching = list(tables), config.cache
        share = sum(tables.values()), sum(t.line_bytes for t in served) // len(served)
        num_cached = caching.num_rows(*share)
        whole = max(1, share[0])
        # In the proportion of the tables' rows, so that a small table does not crowd a large one.
        parts = {t.name: max(1, num_cached * n // whole) for t, n in tables.items()}
        num_rows = {t.name: max(1, n) for t, n in tables.items()}
        is_dynamic, is_uvm = caching.kind is CacheKind.DYNAMIC, caching.kind is CacheKind.UVM
        cache = EmbeddingCache(
            served,
            _devices(caching),
            num_rows=parts if is_dynamic else num_rows,
            kind=caching.kind,
            num_device_rows=num_cached if is_uvm else None,
        )
        levels = None
        if caching.kind is not CacheKind.STATIC:
            levels = RowLevels(
                stack.stores,
                served,
                names=stack.names,
                rules=stack.rules,
                records=stack.records,
            )
        return LeveledLookup(cache, levels, hit_rate_threshold=config.hit_rate_threshold)

    return make


def _devices(config: CacheConfig) -> tuple[str, ...]:
    if config.devices:
        return config.devices
    return ("cuda:0" if torch.cuda.is_available() else "cpu",)
