"""Translates TorchRec's and FBGEMM's settings, and says which collections torchembed supports."""

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import DataType, PoolingType

from torchembed.core.types import OptimizerKind
from torchembed.integrations.torchrec.plans import (
    disk,
    dynamic_tables,
    given_storages,
    host_memory,
)
from torchembed.integrations.torchrec.tables.fused_tables import UpdateSettings
from torchembed.integrations.torchrec.versions import unsupported_table_setting
from torchembed.ops.rowwise_update import UpdateRule

FusedParams: TypeAlias = dict[str, Any]
"""Keyword arguments of FBGEMM's tables, as TorchRec collects them."""

OPTIMIZERS = {
    EmbOptimType.EXACT_SGD: OptimizerKind.SGD,
    EmbOptimType.EXACT_ADAGRAD: OptimizerKind.ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: OptimizerKind.ROWWISE_ADAGRAD,
    EmbOptimType.ADAM: OptimizerKind.ADAM,
}

SHARDING_TYPES = (
    ShardingType.TABLE_WISE.value,
    ShardingType.COLUMN_WISE.value,
    ShardingType.TABLE_COLUMN_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.DATA_PARALLEL.value,
)

_DATA_TYPES = (DataType.FP32, DataType.FP16, DataType.BF16)
_OUTPUT_TYPES = (SparseType.FP32, SparseType.FP16, SparseType.BF16)

_USED = frozenset(
    (
        *("optimizer", "learning_rate", "eps", "beta1", "beta2", "weight_decay"),
        *("weight_decay_mode", "stochastic_rounding", "output_dtype", "bounds_check_mode"),
        *(dynamic_tables.PARAMETER, given_storages.PARAMETER, host_memory.PARAMETER),
    )
)
_NOTHING_TO_DO = frozenset(
    (
        # FBGEMM's caches: tables in device memory have none, those in host memory are checked.
        *("cache_algorithm", "cache_load_factor", "cache_sets", "cache_reserved_memory"),
        *("cache_precision", "enforce_hbm", "prefetch_pipeline", "multipass_prefetch_config"),
        *("uvm_non_rowwise_momentum", "uvm_host_mapped", "gather_uvm_cache_stats"),
        *("record_cache_metrics", "table_names"),
        # Arguments of optimizers that are refused by name.
        *("momentum", "eta"),
        # torchembed's kernels choose these types themselves.
        *("embedding_table_index_type", "embedding_table_offset_type"),
    )
)
_ONLY_AS = {
    "gradient_clipping": False,
    "max_norm": 0.0,
    "enable_raw_embedding_streaming": False,
    "use_experimental_tbe": False,
}
"""Settings that are supported with this value alone."""


def output_dtype(config: GroupedEmbeddingConfig) -> torch.dtype:
    """The dtype of the vectors that a kernel with ``config`` looks up."""
    return (config.fused_params or {}).get("output_dtype", SparseType.FP32).as_dtype()


def update_settings(config: GroupedEmbeddingConfig) -> UpdateSettings:
    """Translate the FBGEMM arguments in ``config``, with FBGEMM's defaults."""
    fused_params = config.fused_params or {}
    kind = OPTIMIZERS[fused_params.get("optimizer", EmbOptimType.EXACT_SGD)]
    rule = UpdateRule(
        kind=kind,
        eps=fused_params.get("eps", 1.0e-8),
        beta1=fused_params.get("beta1", 0.9),
        beta2=fused_params.get("beta2", 0.999),
        weight_decay=fused_params["weight_decay"] if _decays(fused_params) else 0.0,
    )
    return UpdateSettings(
        rule=rule,
        learning_rate=fused_params.get("learning_rate", 0.01),
        stochastic_rounding=fused_params.get("stochastic_rounding", True),
        bounds_check=fused_params.get("bounds_check_mode", BoundsCheckMode.WARNING),
    )


def _decays(fused_params: FusedParams) -> bool:
    """True where FBGEMM applies ``weight_decay``: SGD and Adagrad never do, row-wise Adagrad where
    a mode is given, Adam always."""
    optimizer = fused_params.get("optimizer", EmbOptimType.EXACT_SGD)
    if not fused_params.get("weight_decay"):
        return False
    mode = fused_params.get("weight_decay_mode", WeightDecayMode.NONE)
    return optimizer is EmbOptimType.ADAM or (
        optimizer is EmbOptimType.EXACT_ROWWISE_ADAGRAD and mode is not WeightDecayMode.NONE
    )


def _unsupported_fused_params(
    fused_params: FusedParams, on_cpu: bool, *, on_disk: bool
) -> str | None:
    optimizer = fused_params.get("optimizer", EmbOptimType.EXACT_SGD)
    if optimizer not in OPTIMIZERS:
        return f"its optimizer is {optimizer}"
    output = fused_params.get("output_dtype", SparseType.FP32)
    if output not in _OUTPUT_TYPES:
        return f"its output_dtype is {output}"
    mode = fused_params.get("weight_decay_mode", WeightDecayMode.NONE)
    if mode not in (WeightDecayMode.NONE, WeightDecayMode.L2):
        return f"its weight_decay_mode is {mode}"
    if optimizer is EmbOptimType.ADAM and _decays(fused_params):
        return "FBGEMM's Adam decouples weight_decay"
    if on_cpu and _decays(fused_params):
        return "FBGEMM forgets weight_decay on the CPU"
    for name, value in fused_params.items():
        if name in _USED or name in _NOTHING_TO_DO or name == "max_gradient":
            continue  # FBGEMM reads max_gradient only under gradient_clipping
        if on_disk and name in disk.SETTINGS:
            continue
        if name not in _ONLY_AS or value != _ONLY_AS[name]:
            return f"its fused_params have {name} = {value}"
    return None


def unsupported_collection(
    params: dict[str, ParameterSharding],
    infos: Iterable[EmbeddingShardingInfo],
    env: ShardingEnv,
    device: torch.device | None,
) -> str | None:
    """Reason why a collection cannot be sharded over torchembed's tables, the same on every rank;
    None where it can.

    Args:
        params: the plan of its tables.
        infos: TorchRec's record of each table's config, plan and optimizer.
        env: the ranks to shard it over.
        device: the device to shard it to.
    """
    if type(env) is not ShardingEnv:
        return f"2-D parallelism ({type(env).__name__}) places it"
    if env.process_group is None:
        return "it has no process group"
    if device is not None and device.type not in ("cpu", "cuda"):
        return f"it is on {device}"
    kernels = {
        EmbeddingComputeKernel.FUSED.value,
        EmbeddingComputeKernel.DENSE.value,
        *host_memory.IN_HOST_MEMORY,
        disk.ON_DISK,
    }
    for name, sharding in params.items():
        if sharding.sharding_type not in SHARDING_TYPES:
            return f"table {name} is sharded {sharding.sharding_type}"
        if sharding.compute_kernel not in kernels:
            return f"table {name} has compute kernel {sharding.compute_kernel}"
    for info in infos:
        config = info.embedding_config
        if config.data_type not in _DATA_TYPES:
            return f"table {config.name} has data type {config.data_type}"
        if config.is_weighted and config.pooling is PoolingType.MEAN:
            # FBGEMM's gradients of rows and of per-id weights do not match its own mean.
            return f"table {config.name} has a mean of weighted vectors"
        setting = unsupported_table_setting(config)
        if setting is not None:
            return f"table {config.name} has {setting}"
        fused_params = info.fused_params or {}
        kernel = info.param_sharding.compute_kernel
        on_cpu = device is not None and device.type == "cpu"
        reason = _unsupported_fused_params(fused_params, on_cpu, on_disk=kernel == disk.ON_DISK)
        if reason is None and kernel in host_memory.IN_HOST_MEMORY:
            reason = host_memory.unsupported_cache(fused_params, config.data_type)
        elif reason is None and kernel == disk.ON_DISK:
            reason = disk.unsupported_disk(fused_params, config.data_type)
        if reason is not None:
            return f"table {config.name}: {reason}"
    return None
