"""Tables that TorchRec's plans put on disk, and what of them host memory and the device hold."""

import dataclasses
import functools
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.comm import get_local_rank
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType

from torchembed.integrations.torchrec.plans.host_memory import (
    cached_rows,
    shared_rows,
    unsupported_cache,
)
from torchembed.integrations.torchrec.plans.table_configs import table_configs
from torchembed.modules.configs import initializer_of
from torchembed.stores.rocksdb.opening import import_rocksdict
from torchembed.tables import Initializer, Uniform, is_function_of_id

ON_DISK = EmbeddingComputeKernel.KEY_VALUE.value
"""The compute kernel whose tables live on disk, behind host memory and a cache on the device."""

PARAMETER = "torchembed_disk"
"""Name under which the settings of tables on disk are among a kernel's ``fused_params``."""

_DIRECTORY, _CACHE_MIB, _HOST_GIB = "ssd_storage_directory", "max_l1_cache_size", "l2_cache_size"

WITHOUT_EFFECT = (
    *("ssd_rocksdb_write_buffer_size", "ssd_rocksdb_shards", "enable_async_update"),
    *("bulk_init_chunk_size", "lazy_bulk_init_enabled", "res_store_shards"),
    *("stats_reporter_config", "kvzch_tbe_config", "load_ckpt_without_opt"),
    *("ps_client_thread_num", "ps_max_key_per_request", "ps_max_local_index_length"),
)
"""Settings, of how FBGEMM's tables on disk work, that change nothing here."""

_ONLY_AS: dict[str, tuple[Any, ...]] = {
    "use_passed_in_path": (True, 1),
    "gather_ssd_cache_stats": (None, False),
    "enable_raw_embedding_streaming": (None, False),
    "ps_hosts": (None,),
}
"""Settings of FBGEMM's tables on disk that are supported with these values alone."""

SETTINGS = frozenset((_DIRECTORY, _CACHE_MIB, _HOST_GIB, *WITHOUT_EFFECT, *_ONLY_AS, PARAMETER))
"""Names that ``fused_params`` may hold for tables on disk alone."""

_logger = logging.getLogger("torchembed.integrations.torchrec")


class DiskSizes(NamedTuple):
    """The bytes of a kernel's tables, with their optimizer state, on the device and on the host."""

    cache_bytes: int | None
    """The most that caches on the device take; None for no bound."""
    host_bytes: int
    """The bytes of host memory that the tables take, if that is enough."""

    def rows(
        self, num_rows: Sequence[int], load_factors: Sequence[float], line_bytes: int
    ) -> "RowsOfEach":
        """The rows of each table of one width, equal for all, as they share host memory and cache.

        Host memory has room for twice the rows of the cache at least: those that the cache holds,
        and as many as a batch can use.

        Args:
            num_rows: of each table.
            load_factors: the part of each table's rows in the cache, where the bound allows it.
            line_bytes: of a row with its optimizer state.
        """
        num_cached = cached_rows(num_rows, load_factors)
        if self.cache_bytes is not None:
            num_cached = min(num_cached, self.cache_bytes // line_bytes)
        in_cache = shared_rows(num_rows, num_cached)
        num_slots = sum(min(in_cache, rows) for rows in num_rows)
        num_in_host = max(self.host_bytes // line_bytes, 2 * num_slots)
        return RowsOfEach(in_cache, shared_rows(num_rows, num_in_host))


class RowsOfEach(NamedTuple):
    """Rows of each of several tables."""

    in_cache: int
    in_host: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiskSettings:
    """Settings of the tables on disk of a kernel, equal for those that TorchRec puts into one."""

    path: str
    """A folder."""
    sizes: DiskSizes
    initializers: Mapping[str, Initializer] = dataclasses.field(compare=False)
    """The initializers of all tables on disk of the collection, by name."""


def disk_sizes(fused_params: Mapping[str, Any]) -> DiskSizes:
    """The sizes that ``fused_params`` name."""
    cache_mib, host_gib = fused_params.get(_CACHE_MIB), fused_params.get(_HOST_GIB) or 0
    return DiskSizes(None if cache_mib is None else cache_mib << 20, host_gib << 30)


def note_disk(infos: Iterable[EmbeddingShardingInfo], module: nn.Module) -> None:
    """Put the settings of the tables of ``module`` on disk into the ``fused_params`` of their
    infos, and the optimizer that TorchRec's have by default, in place."""
    on_disk = [info for info in infos if info.param_sharding.compute_kernel == ON_DISK]
    if not on_disk:
        return
    initializers = {config.name: _initializer(config) for config in table_configs(module)}
    for info in on_disk:
        given = info.fused_params or {}
        settings = DiskSettings(
            path=_folder(given.get(_DIRECTORY)),
            sizes=disk_sizes(given),
            initializers=initializers,
        )
        default = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
        info.fused_params = {**default, **given, PARAMETER: settings}


def _initializer(config: BaseEmbeddingConfig) -> Initializer:
    found = initializer_of(config)
    if is_function_of_id(found):
        return found
    return Uniform(low=config.get_weight_init_min(), high=config.get_weight_init_max())


def _folder(given: str | None) -> str:
    """The folder that ``ssd_storage_directory`` means, in TorchRec's reading."""
    if given is None:
        return _temporary_folder().name
    return given.replace("@local_rank", str(get_local_rank())) if "@local_rank" in given else given


@functools.cache
def _temporary_folder() -> "tempfile.TemporaryDirectory[str]":
    """A folder for all tables on disk of this process that were given none, removed as it ends."""
    made = tempfile.TemporaryDirectory(prefix="torchembed_", ignore_cleanup_errors=True)
    _logger.info("tables on disk without ssd_storage_directory are in %s", made.name)
    return made


def disk_settings(config: GroupedEmbeddingConfig) -> DiskSettings | None:
    """The settings of a kernel's tables; None where they are not on disk."""
    return cast("DiskSettings | None", (config.fused_params or {}).get(PARAMETER))


def unsupported_disk(fused_params: Mapping[str, Any], data_type: DataType) -> str | None:
    """A setting of a table on disk that torchembed does not have, or why it has none; None where
    nothing stands against it.

    Args:
        data_type: of the table's rows.
    """
    for name, values in _ONLY_AS.items():
        if name in fused_params and fused_params[name] not in values:
            return f"its {name} is {fused_params[name]}"
    if fused_params.get(_CACHE_MIB, 1) < 1:
        return f"its {_CACHE_MIB} is {fused_params[_CACHE_MIB]}"
    if fused_params.get(_HOST_GIB, 0) < 0:
        return f"its {_HOST_GIB} is {fused_params[_HOST_GIB]}"
    directory = fused_params.get(_DIRECTORY)
    if directory is not None and (not directory or "," in directory):
        return f"its {_DIRECTORY} is {directory!r}, and not one folder"
    try:
        import_rocksdict()
    except ImportError as error:
        return str(error)
    return unsupported_cache(fused_params, data_type)


def without_effect(
    infos: Iterable[EmbeddingShardingInfo], module: nn.Module
) -> dict[str, list[str]]:
    """The settings of tables of ``module`` on disk that were given and change nothing, and these
    tables."""
    found: dict[str, list[str]] = {}
    configs = {config.name: config for config in table_configs(module)}
    for info in infos:
        name, given = info.embedding_config.name, info.fused_params or {}
        if info.param_sharding.compute_kernel == ON_DISK:
            settings = [setting for setting in WITHOUT_EFFECT if given.get(setting)]
            if not is_function_of_id(initializer_of(configs[name])):
                settings.append("init_fn")
            for setting in settings:
                found.setdefault(setting, []).append(name)
    return found


def make_folder(settings: DiskSettings) -> None:
    """Make the folder of the tables, and those that it is in, where there are none."""
    os.makedirs(settings.path, exist_ok=True)
