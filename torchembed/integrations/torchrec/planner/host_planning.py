"""Tables in host memory in TorchRec's planner: what they and their caches take."""

import copy
import functools
import math
from collections.abc import Callable

from torch import nn
from torchrec.distributed.embedding_types import BaseEmbeddingSharder, EmbeddingComputeKernel
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import Shard, ShardingOption
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from torchembed.integrations.torchrec.install import shards_here
from torchembed.integrations.torchrec.plans.host_memory import (
    DEFAULT_LOAD_FACTOR,
    IN_HOST_MEMORY,
)
from torchembed.integrations.torchrec.plans.settings import OPTIMIZERS
from torchembed.integrations.torchrec.versions import sharder_of
from torchembed.ops.rowwise_update import UpdateRule
from torchembed.sharding.planning.storage_costs import cache_index_bytes

Populate = Callable[..., None]
"""``EmbeddingEnumerator.populate_estimates``."""


def _with_host_tables(populate: Populate) -> Populate:
    @functools.wraps(populate)
    def wrapped(self: EmbeddingEnumerator, sharding_options: list[ShardingOption]) -> None:
        populate(self, sharding_options)
        counted = [
            (option, rule, sharder)
            for option in sharding_options
            if option.compute_kernel in IN_HOST_MEMORY
            and shards_here(sharder := sharder_of(self, option))
            and (rule := _rule_of(option, sharder)) is not None
        ]
        # What TorchRec counts without a cache: buffers on the device, and the table in host memory.
        uncached = [_uncached(option) for option, _, _ in counted]
        populate(self, uncached)
        for (option, rule, sharder), other in zip(counted, uncached, strict=True):
            _count(option, other, rule, sharder)

    return wrapped


def _rule_of(option: ShardingOption, sharder: BaseEmbeddingSharder[nn.Module]) -> UpdateRule | None:
    """The rule that updates the table of ``option``; None where torchembed has none, and leaves the
    table to TorchRec."""
    (kind,) = getattr(option.tensor, "_optimizer_classes", [None])[:1]
    try:
        chosen = None if kind is None else optimizer_type_to_emb_opt_type(kind)
    except ValueError:
        return None
    if chosen is None:
        chosen = (sharder.fused_params or {}).get("optimizer")
    return UpdateRule(kind=OPTIMIZERS[chosen]) if chosen in OPTIMIZERS else None


def _uncached(option: ShardingOption) -> ShardingOption:
    """``option`` without estimates, and with tables in host memory that have no cache."""
    made = copy.copy(option)
    made.compute_kernel = EmbeddingComputeKernel.FUSED_UVM.value
    made.shards = [Shard(size=shard.size, offset=shard.offset) for shard in option.shards]
    return made


def _count(
    option: ShardingOption,
    uncached: ShardingOption,
    rule: UpdateRule,
    sharder: BaseEmbeddingSharder[nn.Module],
) -> None:
    """Give the shards of ``option`` the memory that their tables take here, in place."""
    factor = option.cache_load_factor or (sharder.fused_params or {}).get("cache_load_factor")
    for shard, other in zip(option.shards, uncached.shards, strict=True):
        assert shard.storage is not None
        assert other.storage is not None
        num_rows, num_columns = shard.size
        itemsize = option.tensor.element_size()
        line_bytes = num_columns * itemsize + rule.state_bytes(1, num_columns)
        num_slots = math.ceil(num_rows * (factor or DEFAULT_LOAD_FACTOR))
        found_by = cache_index_bytes(num_slots, num_rows, is_rounded=itemsize < 4)
        shard.storage.hbm = other.storage.hbm + num_slots * line_bytes + found_by
        shard.storage.ddr = num_rows * line_bytes


@functools.cache
def plan_host_tables() -> None:
    """Let TorchRec's planners count what torchembed's tables in host memory take, and their caches
    on the device. Estimates of other tables stay as they are. A second call does nothing."""
    EmbeddingEnumerator.populate_estimates = _with_host_tables(
        EmbeddingEnumerator.populate_estimates
    )
