"""Storages of the tables of TorchRec's kernels, as their ``fused_params`` name them."""

from collections.abc import Mapping

from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable
from torchrec.modules.embedding_configs import data_type_to_sparse_type

from torchembed.integrations.torchrec.plans.disk import disk_settings
from torchembed.integrations.torchrec.plans.given_storages import given_storage
from torchembed.integrations.torchrec.plans.host_memory import (
    in_host_memory,
    load_factor,
    shared_cache,
)
from torchembed.integrations.torchrec.plans.settings import update_settings
from torchembed.tables import Disk, Initializer, Storage


def storages(config: GroupedEmbeddingConfig) -> list[Storage | None]:
    """The storage of each table of a kernel; equal for tables of one width, which share it."""
    tables, given = config.embedding_tables, given_storage(config)
    if given is not None:
        return [given.storage] * len(tables)
    if not in_host_memory(config) and disk_settings(config) is None:
        return [None] * len(tables)
    by_width = {
        width: _shared_storage(config, [table for table in tables if table.local_cols == width])
        for width in {table.local_cols for table in tables}
    }
    return [by_width[table.local_cols] for table in tables]


def initializers_on_disk(config: GroupedEmbeddingConfig) -> Mapping[str, Initializer] | None:
    """The initializers of tables of a kernel on disk, by the tables' names, which may be those of
    more; None where they live elsewhere."""
    settings, given = disk_settings(config), given_storage(config)
    if settings is not None:
        return settings.initializers
    if given is not None and isinstance(given.storage, Disk):
        return given.initializers
    return None


def _shared_storage(config: GroupedEmbeddingConfig, tables: list[ShardedEmbeddingTable]) -> Storage:
    num_rows = [table.local_rows for table in tables]
    factors = [load_factor(table.fused_params) for table in tables]
    settings = disk_settings(config)
    if settings is None:
        return shared_cache(num_rows, factors)
    width = tables[0].local_cols
    itemsize = data_type_to_sparse_type(config.data_type).as_dtype().itemsize
    line_bytes = width * itemsize + update_settings(config).rule.state_bytes(1, width)
    in_cache, in_host = settings.sizes.rows(num_rows, factors, line_bytes)
    return Disk(path=settings.path, cache_rows=in_cache, host_rows=in_host)
