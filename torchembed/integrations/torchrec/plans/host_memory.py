"""Tables that TorchRec's plans put into host memory, and the caches that they get on the device."""

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.modules.embedding_configs import DataType, data_type_to_sparse_type

from torchembed.tables import HostMemory

IN_HOST_MEMORY = (
    EmbeddingComputeKernel.FUSED_UVM.value,
    EmbeddingComputeKernel.FUSED_UVM_CACHING.value,
)
"""Compute kernels whose tables live in host memory, each behind a cache on the device."""

PARAMETER = "torchembed_host_memory"
"""Name under which ``fused_params`` say that a kernel's tables live in host memory; TorchRec then
puts no others into it."""

DEFAULT_LOAD_FACTOR = 0.2
"""FBGEMM's: the part of a table's rows that the cache holds, where the plan says nothing."""

_LOAD_FACTOR = "cache_load_factor"

_ONLY_AS: dict[str, tuple[Any, ...]] = {
    "cache_algorithm": (None, CacheAlgorithm.LRU),
    "cache_sets": (0,),
    "cache_reserved_memory": (None, 0.0),
    "enforce_hbm": (None, False),
    "gather_uvm_cache_stats": (None, False),
    "record_cache_metrics": (None,),
}
"""Settings of FBGEMM's caches that are supported with these values alone."""


def note_host_memory(infos: Iterable[EmbeddingShardingInfo]) -> None:
    """Note in the ``fused_params`` of ``infos`` which tables live in host memory, in place."""
    for info in infos:
        if info.param_sharding.compute_kernel in IN_HOST_MEMORY:
            info.fused_params = {**(info.fused_params or {}), PARAMETER: True}


def in_host_memory(config: GroupedEmbeddingConfig) -> bool:
    """True where the tables of a kernel live in host memory."""
    return bool((config.fused_params or {}).get(PARAMETER))


def load_factor(fused_params: Mapping[str, Any] | None) -> float:
    """The part of a table's rows that its cache is to hold."""
    return (fused_params or {}).get(_LOAD_FACTOR) or DEFAULT_LOAD_FACTOR


def unsupported_cache(fused_params: Mapping[str, Any], data_type: DataType) -> str | None:
    """A setting of the cache of a table in host memory that torchembed does not have; None where it
    has them all.

    Args:
        data_type: of the table's rows.
    """
    factor = load_factor(fused_params)
    if not 0.0 < factor <= 1.0:
        return f"its {_LOAD_FACTOR} is {factor}"
    precision = fused_params.get("cache_precision")
    if isinstance(precision, DataType):
        precision = data_type_to_sparse_type(precision)
    rows: SparseType = data_type_to_sparse_type(data_type)
    if precision not in (None, rows):
        return f"its cache_precision is {precision}, and that of its rows {rows}"
    for name, values in _ONLY_AS.items():
        if name in fused_params and fused_params[name] not in values:
            return f"its {name} is {fused_params[name]}"
    return None


def cached_rows(num_rows: Sequence[int], load_factors: Sequence[float]) -> int:
    """The slots of a cache for the part of each table's rows that ``load_factors`` say."""
    return sum(
        math.ceil(rows * factor) for rows, factor in zip(num_rows, load_factors, strict=True)
    )


def shared_rows(num_rows: Sequence[int], wanted: int) -> int:
    """The rows of each table, equal for all, as sharing a storage asks, that are ``wanted`` rows of
    all together, up to one more for each table.

    Args:
        num_rows: of each table, of which it gives no more.
    """
    of_each = bisect.bisect_left(
        range(max(num_rows, default=0)),
        wanted,
        key=lambda of_each: sum(min(of_each, rows) for rows in num_rows),
    )
    return max(of_each, 1)


def shared_cache(num_rows: Sequence[int], load_factors: Sequence[float]) -> HostMemory:
    """The storage of tables that share a cache, which has a slot for the part of each one's rows
    that ``load_factors`` say, up to one more for each table."""
    return HostMemory(cache_rows=shared_rows(num_rows, cached_rows(num_rows, load_factors)))
