"""Models in HugeCTR's configuration."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchembed.serving.configuration.cache_config import CacheConfig
from torchembed.serving.configuration.fields import AboveUpTo, AtLeast, Between
from torchembed.serving.configuration.hugectr_section import Section
from torchembed.serving.configuration.model_config import BatchingConfig, HugectrRows, ModelConfig
from torchembed.serving.levels import CacheKind, RowFormat

_FROM_MODEL_FOLDER = "left out; the model folder says it"
_BY_ITSELF = "left out; it is for HugeCTR's own buffers and threads"


def read_model(values: Any, path: str, left_out: list[str], *, is_fused: bool) -> ModelConfig:
    """The model of one member of ``models``.

    Args:
        is_fused: whether ``fuse_embedding_table`` is set, so that tables may have several files.

    Raises:
        ValueError: for keys that HugeCTR does not have, and for values that cannot be.
    """
    section = Section(values, path, left_out)
    name = section.take("model", str, None)
    if not name:
        raise ValueError(f"{section.path_of('model')} must name the model, got {name!r}")
    tables = _tables(section, is_fused=is_fused)
    defaults = section.take_list("default_value_for_each_table", float) or []
    if defaults and len(defaults) < len(tables):
        raise ValueError(
            f"{section.path_of('default_value_for_each_table')} must have a number for each of "
            f"{len(tables)} tables, got {len(defaults)}"
        )
    if not section.take("i64_input_key", bool, True):
        raise ValueError(
            f"{section.path_of('i64_input_key')} must be true, since keys have 64 bits; convert "
            "those of 32 bits in the files named key"
        )
    config = ModelConfig(
        name=name,
        num_instances=section.take("num_of_worker_buffer_in_pool", int, 2, AtLeast(1)),
        batching=BatchingConfig(max_samples=section.take("max_batch_size", int, 64, AtLeast(1))),
        hit_rate_threshold=section.take("hit_rate_threshold", float, 0.9, AtLeast(0)),
        default_values=dict(zip(tables, defaults, strict=False)),
        hugectr_rows=tables,
        cache=_cache(section),
    )
    for key in ("dense_file", "network_file"):
        if section.take(key, str, ""):
            section.note(
                key,
                "left out; the dense part is what torchembed.serving.models.deploy wrote into the "
                "model folder",
            )
    for key in (
        "maxnum_catfeature_query_per_table_per_sample",
        *("maxnum_des_feature_per_sample", "label_dim", "slot_num"),
    ):
        section.leave_out(key, _FROM_MODEL_FOLDER)
    for key in (
        *("num_of_refresher_buffer_in_pool", "thread_pool_size", "use_context_stream"),
        *("use_hctr_cache_implementation", "init_ec", "enable_pagelock"),
        *("use_algorithm_search", "use_cuda_graph"),
    ):
        section.leave_out(key, _BY_ITSELF)
    for key in ("use_mixed_precision", "scaler"):
        section.leave_out(key, "left out; the dense part computes in the precision it was deployed")
    section.end()
    return config


def _tables(section: Section, *, is_fused: bool) -> dict[str, HugectrRows]:
    """Sources of each table's rows."""
    names = section.take_list("embedding_table_names", str)
    files = section.take_any("sparse_files")
    path = section.path_of("sparse_files")
    if is_fused and isinstance(files, dict):
        names = list(files) if names is None else names
        lacking = [name for name in names if name not in files]
        if lacking:
            raise ValueError(f"{path} must name the folders of {lacking[0]!r}, got {list(files)}")
        lists = [files[name] for name in names]
        are_lists = all(isinstance(part, list) for part in lists)
        if not are_lists or not all(isinstance(folder, str) for part in lists for folder in part):
            raise ValueError(f"{path} must be lists of folders of sparse models, got {files!r}")
        folders = [tuple(part) for part in lists]
    else:
        folders = [(folder,) for folder in section.take_list("sparse_files", str) or []]
    if names is None:
        names = [f"sparse_embedding{i}" for i in range(len(folders))]
    dims = section.take_list("embedding_vecsize_per_table", int, AtLeast(1))
    _check_length(section, "embedding_table_names", names, len(folders))
    _check_length(section, "embedding_vecsize_per_table", dims, len(folders))
    if len(set(names)) != len(names):
        raise ValueError(
            f"{section.path_of('embedding_table_names')} must be distinct, got {names}"
        )
    return {
        name: HugectrRows(folders=tuple(map(Path, part)), dim=None if dims is None else dims[i])
        for i, (name, part) in enumerate(zip(names, folders, strict=True))
    }


def _check_length(
    section: Section, key: str, values: Sequence[object] | None, num_tables: int
) -> None:
    if values is not None and len(values) != num_tables:
        raise ValueError(
            f"{section.path_of(key)} must have one for each of the {num_tables} tables in "
            f"sparse_files, got {len(values)}"
        )


def _cache(section: Section) -> CacheConfig:
    kind = _kind(section)
    devices = section.take_list("deployed_device_list", int, AtLeast(0)) or [0]
    if len(devices) > 1:
        section.note(
            "deployed_device_list",
            "one cache is divided over these devices, where HugeCTR has one on each",
        )
    on_gpus = section.take("gpucache", bool, True)
    if not on_gpus:
        section.note("gpucache", "the cache is in the memory of the CPU")
    share = section.take("gpucacheper", float, 0.2, AboveUpTo(0, 1))
    refreshed = section.take("cache_refresh_percentage_per_iteration", float, 0.0, Between(0, 1))
    interval = section.take("refresh_interval", float, 0.0, AtLeast(0))
    delay = section.take("refresh_delay", float, 0.0, AtLeast(0))
    if interval and (refreshed == 0 or kind is not CacheKind.DYNAMIC):
        section.note("refresh_interval", "left out; nothing is refreshed of such a cache")
        interval = 0.0
    return CacheConfig(
        kind=kind,
        share=None if kind is CacheKind.STATIC else share,
        row_format=RowFormat.FP8 if section.take("fp8_quant", bool, False) else RowFormat.FP32,
        devices=tuple(f"cuda:{d}" for d in devices) if on_gpus else ("cpu",),
        refresh_share=refreshed,
        refresh_delay_seconds=delay,
        refresh_interval_seconds=interval,
    )


def _kind(section: Section) -> CacheKind:
    name = section.take("embedding_cache_type", str, "dynamic").lower()
    if section.take("use_static_table", bool, False):
        name = "static"
    if name == "stochastic":
        section.note("embedding_cache_type", "dynamic, which HugeCTR makes of stochastic as well")
        name = "dynamic"
    kinds = {kind.value: kind for kind in CacheKind}
    if name not in kinds:
        raise ValueError(
            f"{section.path_of('embedding_cache_type')} must be one of "
            f"{', '.join([*kinds, 'stochastic'])}, got {name!r}"
        )
    return kinds[name]
