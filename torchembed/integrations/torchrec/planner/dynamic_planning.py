"""Dynamic tables in TorchRec's planner: the placements that they may have, and their memory."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ModuleSharder

from torchembed.integrations.torchrec.install import shards_here
from torchembed.integrations.torchrec.plans.dynamic_tables import (
    DynamicConfig,
    dynamic_configs,
    refuse_placement,
    rounded_rows,
    unsupported_placement,
)
from torchembed.tables import HashFactory

Enumerate = Callable[..., list[ShardingOption]]
"""``EmbeddingEnumerator.enumerate``."""


def _with_dynamic_tables(enumerate_options: Enumerate) -> Enumerate:
    @functools.wraps(enumerate_options)
    def wrapped(
        self: EmbeddingEnumerator,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[nn.Module]],
        *arguments: Any,
        **settings: Any,
    ) -> list[ShardingOption]:
        options = enumerate_options(self, module, sharders, *arguments, **settings)
        dynamic = [_config_of(option) for option in options]
        if not any(dynamic):
            return options
        _check_sharders(
            sharders, [option for option, of in zip(options, dynamic, strict=True) if of]
        )
        kept, refused, left = list[ShardingOption](), dict[str, str](), set[str]()
        changed: list[tuple[ShardingOption, DynamicConfig]] = []
        for option, config in zip(options, dynamic, strict=True):
            if config is None:
                kept.append(option)
                continue
            reason = unsupported_placement(option.sharding_type, option.compute_kernel)
            if reason is not None:
                refused.setdefault(config.name, reason)
                continue
            left.add(config.name)
            kept.append(option)
            changed.append((option, config))
            _round(option, config)
        for name, reason in refused.items():
            if name not in left:
                refuse_placement(name, reason)
        _check_sharders(sharders, [option for option, _ in changed])
        self.populate_estimates([option for option, _ in changed])
        for option, config in changed:
            _add_index(option, config)
        return kept

    return wrapped


def _check_sharders(
    sharders: Sequence[ModuleSharder[nn.Module]], options: Sequence[ShardingOption]
) -> None:
    """Raise unless torchembed's sharders, or TorchRec's while ours are installed, take the modules
    of ``options``, which are of dynamic tables."""
    by_type = {sharder.module_type: sharder for sharder in sharders}
    for option in options:
        sharder = by_type[type(option.module[1])]
        if not shards_here(sharder):
            raise TypeError(
                f"dynamic table {option.name} must be sharded by torchembed, got TorchRec's "
                f"{type(sharder).__name__}; call torchembed.integrations.torchrec.install(), or "
                "give sharders=torchembed.integrations.torchrec.get_default_sharders()"
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
def plan_dynamic_tables() -> None:
    """Let TorchRec's planners consider, for dynamic tables, what torchembed can shard, with the
    rows that it makes of a capacity and the memory of ids and of what chooses among them.

    Options of other tables stay as they are. A second call does nothing.
    """
    EmbeddingEnumerator.enumerate = _with_dynamic_tables(EmbeddingEnumerator.enumerate)
