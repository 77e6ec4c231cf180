"""Dynamic tables in TorchRec's plans: how many rows their shards have, and where they may be."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeGuard, cast

from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.types import ParameterSharding, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchembed.integrations.torchrec.configs import EmbeddingBagConfig, EmbeddingConfig
from torchembed.integrations.torchrec.plans.placements import check_placement
from torchembed.integrations.torchrec.plans.table_configs import table_configs
from torchembed.integrations.torchrec.versions import C, with_configs
from torchembed.tables import HashFactory, IndexFactory, TableSpec

DynamicConfig = EmbeddingBagConfig | EmbeddingConfig
"""The config of a table that may be dynamic."""

PARAMETER = "torchembed_dynamic"
"""Name under which the settings of dynamic tables are among a kernel's ``fused_params``."""

BY_ROW = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)
"""Sharding types under which a hash of an id chooses one of the ranks that share the rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicTables:
    """Settings of the dynamic tables of a kernel, equal where they are looked up alike, so that
    TorchRec puts such tables into one kernel."""

    index: IndexFactory
    specs: Mapping[str, TableSpec] = dataclasses.field(compare=False)
    """Specs of all dynamic tables of the collection, by name."""


def dynamic_settings(config: GroupedEmbeddingConfig) -> DynamicTables | None:
    """The settings of a kernel's tables; None where they are static."""
    return cast("DynamicTables | None", (config.fused_params or {}).get(PARAMETER))


def is_dynamic(config: BaseEmbeddingConfig) -> TypeGuard[DynamicConfig]:
    """True for the config of a dynamic table."""
    return isinstance(config, DynamicConfig) and config.dynamic is not None


def dynamic_configs(module: nn.Module) -> dict[str, DynamicConfig]:
    """The configs of the dynamic tables of an unsharded collection of TorchRec's, by name."""
    return {config.name: config for config in table_configs(module) if is_dynamic(config)}


def described(name: str) -> str:
    """A dynamic table, in errors."""
    return f"dynamic table {name}"


def rounded_rows(
    config: DynamicConfig, shards: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[tuple[list[int], list[int]]]:
    """Sizes and offsets ``[rows, columns]`` of a dynamic table's shards, given those of a static
    one with as many rows: the ranks that share the rows hold a table of their share of the
    capacity each, rounded up to even buckets, and the rows that ids without one share."""
    assert config.dynamic is not None
    factory, capacity = HashFactory(config.dynamic), config.num_embeddings
    num_parts = Counter(offsets[1] for _, offsets in shards)
    seen: Counter[int] = Counter()
    rounded = []
    for (_, num_columns), (_, first_column) in shards:
        num_rows = factory.rows_for(-(-capacity // num_parts[first_column]))
        first_row = seen[first_column] * num_rows
        seen[first_column] += 1
        rounded.append(([num_rows, num_columns], [first_row, first_column]))
    return rounded


def _rounded_sharding(sharding: ParameterSharding, config: DynamicConfig) -> ParameterSharding:
    spec = cast("EnumerableShardingSpec", sharding.sharding_spec)
    shards = [(shard.shard_sizes, shard.shard_offsets) for shard in spec.shards]
    made = [
        ShardMetadata(shard_offsets=offsets, shard_sizes=sizes, placement=shard.placement)
        for shard, (sizes, offsets) in zip(spec.shards, rounded_rows(config, shards), strict=True)
    ]
    return dataclasses.replace(sharding, sharding_spec=EnumerableShardingSpec(made))


def with_rounded_rows(
    module: C, params: dict[str, ParameterSharding]
) -> tuple[C, dict[str, ParameterSharding]]:
    """``module`` and the plan of its tables as they are sharded: with the rows that dynamic tables
    have, as many as their capacities or a few more. Both are unchanged without such tables.

    Raises:
        ValueError: for a placement that a dynamic table cannot have.
    """
    dynamic = dynamic_configs(module)
    if not dynamic:
        return module, params
    params, num_rows = dict(params), dict[str, int]()
    for name, config in dynamic.items():
        sharding = params[name]
        check_placement(described(name), sharding.sharding_type, sharding.compute_kernel)
        params[name] = _rounded_sharding(sharding, config)
        shards = cast("EnumerableShardingSpec", params[name].sharding_spec).shards
        num_rows[name] = max(shard.shard_offsets[0] + shard.shard_sizes[0] for shard in shards)

    def with_num_rows(config: BaseEmbeddingConfig) -> BaseEmbeddingConfig:
        if config.name not in num_rows:
            return config
        return dataclasses.replace(config, num_embeddings=num_rows[config.name])

    return with_configs(module, with_num_rows), params


def note_settings(infos: Iterable[EmbeddingShardingInfo], module: nn.Module) -> None:
    """Put the settings of the dynamic tables of ``module`` into the ``fused_params`` of their
    infos, in place."""
    configs = dynamic_configs(module)
    specs = {name: config.to_torchembed().spec(seed=0) for name, config in configs.items()}
    for info in infos:
        name = info.embedding_config.name
        if name in specs:
            settings = DynamicTables(index=specs[name].index, specs=specs)
            info.fused_params = {**(info.fused_params or {}), PARAMETER: settings}
