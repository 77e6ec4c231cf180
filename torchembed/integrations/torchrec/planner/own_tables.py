"""Tables that torchembed alone has in TorchRec's planner: the placements that they may have, and
what dynamic ones take."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ModuleSharder

from torchembed.integrations.torchrec.install import shards_here
from torchembed.integrations.torchrec.plans import dynamic_tables, given_storages
from torchembed.integrations.torchrec.plans.dynamic_tables import (
    DynamicConfig,
    dynamic_configs,
    rounded_rows,
)
from torchembed.integrations.torchrec.plans.placements import (
    refuse_placement,
    unsupported_placement,
)
from torchembed.tables import HashFactory

Enumerate = Callable[..., list[ShardingOption]]
"""``EmbeddingEnumerator.enumerate``."""


def _with_own_tables(enumerate_options: Enumerate) -> Enumerate:
    @functools.wraps(enumerate_options)
    def wrapped(
        self: EmbeddingEnumerator,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[nn.Module]],
        *arguments: Any,
        **settings: Any,
    ) -> list[ShardingOption]:
        options = enumerate_options(self, module, sharders, *arguments, **settings)
        own = {id(option): table for option in options if (table := _own_table(option))}
        _check_sharders(sharders, [(option, own.get(id(option))) for option in options])
        kept, refused, left = list[ShardingOption](), dict[str, str](), set[str]()
        changed: list[tuple[ShardingOption, DynamicConfig]] = []
        for option in options:
            table, config = own.get(id(option)), _config_of(option)
            if table is not None:
                reason = unsupported_placement(option.sharding_type, option.compute_kernel)
                if reason is not None:
                    refused.setdefault(table, reason)
                    continue
                left.add(table)
            kept.append(option)
            if config is not None:
                changed.append((option, config))
                _round(option, config)
        for table, reason in refused.items():
            if table not in left:
                refuse_placement(table, reason)
        if changed:
            self.populate_estimates([option for option, _ in changed])
        for option, config in changed:
            _add_index(option, config)
        return kept

    return wrapped


def _own_table(option: ShardingOption) -> str | None:
    """The table of ``option``, as errors describe it, where torchembed alone has such tables."""
    _, module = option.module
    if option.name in dynamic_configs(module):
        return dynamic_tables.described(option.name)
    if option.name in given_storages.given_storages(module):
        return given_storages.described(option.name)
    return None


def _check_sharders(
    sharders: Sequence[ModuleSharder[nn.Module]],
    options: Sequence[tuple[ShardingOption, str | None]],
) -> None:
    """Raise unless torchembed's sharders, or TorchRec's while ours are installed, take the modules
    of those of ``options`` that are of tables which torchembed alone has, as errors describe them.
    """
    by_type = {sharder.module_type: sharder for sharder in sharders}
    for option, table in options:
        if table is not None and not shards_here(sharder := by_type[type(option.module[1])]):
            raise TypeError(
                f"{table} must be sharded by torchembed, got TorchRec's {type(sharder).__name__}; "
                "call torchembed.integrations.torchrec.install(), or give "
                "sharders=torchembed.integrations.torchrec.get_default_sharders()"
            )


def _config_of(option: ShardingOption) -> DynamicConfig | None:
    _, module = option.module
    return dynamic_configs(module).get(option.name)


def _round(option: ShardingOption, config: DynamicConfig) -> None:
    """Give the shards of ``option`` the rows that those of a dynamic table have, in place."""
    shards = [(shard.size, shard.offset) for shard in option.shards]
    for shard, (size, offset) in zip(option.shards, rounded_rows(config, shards), strict=True):
        shard.size, shard.offset = size, offset


def _add_index(option: ShardingOption, config: DynamicConfig) -> None:
    """Add what a dynamic table keeps beside its rows to the estimates of ``option``, in place."""
    assert config.dynamic is not None
    factory = HashFactory(config.dynamic)
    for shard in option.shards:
        assert shard.storage is not None
        num_bytes = factory.bytes_for(shard.size[0])
        # Estimates of a CPU's ranks have nothing in the memory of a GPU.
        if shard.storage.hbm:
            shard.storage.hbm += num_bytes
        else:
            shard.storage.ddr += num_bytes


@functools.cache
def plan_own_tables() -> None:
    """Let TorchRec's planners consider, for dynamic tables and those whose config has a storage,
    what torchembed can shard; for dynamic ones with the rows that it makes of a capacity and the
    memory of ids and of what chooses among them.

    Options of other tables stay as they are. A second call does nothing.
    """
    EmbeddingEnumerator.enumerate = _with_own_tables(EmbeddingEnumerator.enumerate)
