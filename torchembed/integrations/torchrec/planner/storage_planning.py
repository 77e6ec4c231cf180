"""Tables in host memory and on disk in TorchRec's planner: what they and their caches take."""

import copy
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embedding_types import BaseEmbeddingSharder, EmbeddingComputeKernel
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import Shard, ShardingOption
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from torchembed.integrations.torchrec.install import shards_here
from torchembed.integrations.torchrec.plans.disk import ON_DISK, disk_sizes
from torchembed.integrations.torchrec.plans.given_storages import given_storages
from torchembed.integrations.torchrec.plans.host_memory import (
    IN_HOST_MEMORY,
    load_factor,
    shared_cache,
)
from torchembed.integrations.torchrec.plans.settings import OPTIMIZERS
from torchembed.integrations.torchrec.versions import sharder_of
from torchembed.ops.rowwise_update import UpdateRule
from torchembed.sharding.planning.storage_costs import HeldRows, held_rows
from torchembed.tables import Disk, Storage

Populate = Callable[..., None]
"""``EmbeddingEnumerator.populate_estimates``."""

_ON_DEVICE = EmbeddingComputeKernel.FUSED.value
_UNCACHED = EmbeddingComputeKernel.FUSED_UVM.value


def _with_stored_tables(populate: Populate) -> Populate:
    @functools.wraps(populate)
    def wrapped(self: EmbeddingEnumerator, sharding_options: list[ShardingOption]) -> None:
        populate(self, sharding_options)
        counted = [
            (option, rule, sharder)
            for option in sharding_options
            if _is_elsewhere(option)
            and shards_here(sharder := sharder_of(self, option))
            and (rule := _rule_of(option, sharder)) is not None
        ]
        others = list[list[ShardingOption]]()
        for kernel in (_ON_DEVICE, _UNCACHED, ON_DISK):
            others.append([_with_kernel(option, kernel) for option, _, _ in counted])
            populate(self, others[-1])
        for (option, rule, sharder), *of_option in zip(counted, *others, strict=True):
            for number, shard in enumerate(option.shards):
                elsewhere = _Elsewhere(*(other.shards[number] for other in of_option))
                num_rows, num_columns = shard.size
                itemsize = option.tensor.element_size()
                line_bytes = num_columns * itemsize + rule.state_bytes(1, num_columns)
                held = held_rows(
                    _storage_of(option, num_rows, line_bytes, sharder.fused_params or {}),
                    num_rows,
                    line_bytes,
                    is_rounded=itemsize < 4,
                    takes_any_id=False,
                )
                _count(shard, held, line_bytes, elsewhere)
                if option.compute_kernel not in IN_HOST_MEMORY:
                    _estimate(option, shard, held, elsewhere)

    return wrapped


def _is_elsewhere(option: ShardingOption) -> bool:
    """True where the table of ``option`` would not live on the device, which is a GPU."""
    if option.compute_kernel in (*IN_HOST_MEMORY, ON_DISK):
        return True
    _, module = option.module
    on_gpus = all(shard.storage is not None and shard.storage.hbm for shard in option.shards)
    return option.name in given_storages(module) and on_gpus


def _rule_of(option: ShardingOption, sharder: BaseEmbeddingSharder[nn.Module]) -> UpdateRule | None:
    """The rule that updates the table of ``option``; None where torchembed has none, and leaves the
    table to TorchRec."""
    (kind,) = getattr(option.tensor, "_optimizer_classes", [None])[:1]
    try:
        chosen = None if kind is None else optimizer_type_to_emb_opt_type(kind)
    except ValueError:
        return None
    if chosen is None:
        default = EmbOptimType.EXACT_ROWWISE_ADAGRAD if option.compute_kernel == ON_DISK else None
        chosen = (sharder.fused_params or {}).get("optimizer", default)
    return UpdateRule(kind=OPTIMIZERS[chosen]) if chosen in OPTIMIZERS else None


def _with_kernel(option: ShardingOption, kernel: str) -> ShardingOption:
    """``option`` without estimates, and of another compute kernel."""
    made = copy.copy(option)
    made.compute_kernel = kernel
    made.shards = [Shard(size=shard.size, offset=shard.offset) for shard in option.shards]
    return made


class _Elsewhere(NamedTuple):
    """A shard as TorchRec counts it where all rows are in one place, without a cache."""

    on_device: Shard
    in_host: Shard
    on_disk: Shard


def _storage_of(
    option: ShardingOption, num_rows: int, line_bytes: int, fused_params: Mapping[str, Any]
) -> Storage:
    """The storage of a shard of ``num_rows``, each of ``line_bytes`` with its optimizer state."""
    _, module = option.module
    given = given_storages(module).get(option.name)
    if given is not None:
        return given
    factor = option.cache_load_factor or load_factor(fused_params)
    if option.compute_kernel in IN_HOST_MEMORY:
        return shared_cache([num_rows], [factor])
    params = option.key_value_params
    named = {} if params is None else dataclasses.asdict(params)
    found = {**fused_params, **{name: value for name, value in named.items() if value is not None}}
    in_cache, in_host = disk_sizes(found).rows([num_rows], [factor], line_bytes)
    # Wherever that is.
    return Disk(path=os.curdir, cache_rows=in_cache, host_rows=in_host)


def _count(shard: Shard, held: HeldRows, line_bytes: int, elsewhere: _Elsewhere) -> None:
    """Give ``shard`` the memory that its table takes here, in place."""
    assert shard.storage is not None
    assert elsewhere.in_host.storage is not None
    # What TorchRec counts there on the device are the buffers.
    on_device = held.on_device * line_bytes + held.index_bytes
    shard.storage.hbm = elsewhere.in_host.storage.hbm + on_device
    shard.storage.ddr = held.in_host * line_bytes + held.host_index_bytes
    shard.storage.ssd = held.on_disk * line_bytes


def _estimate(option: ShardingOption, shard: Shard, held: HeldRows, elsewhere: _Elsewhere) -> None:
    """Give ``shard`` the time that its reads and updates take where each finds its row, in place:
    TorchRec takes it that all are in one place."""
    perfs = [found.perf for found in elsewhere]
    if shard.perf is None or None in perfs:
        return
    num_rows = max(shard.size[0], 1)
    on_device, in_host = (_hit_rate(option, n / num_rows) for n in (held.on_device, held.in_host))
    parts = (on_device, in_host - on_device, 1 - in_host)

    def mean(name: str) -> float:
        return sum(part * getattr(perf, name) for part, perf in zip(parts, perfs, strict=True))

    shard.perf = dataclasses.replace(
        shard.perf, fwd_compute=mean("fwd_compute"), bwd_compute=mean("bwd_compute")
    )


def _hit_rate(option: ShardingOption, part: float) -> float:
    """The part of lookups that a cache for ``part`` of the rows answers: by the statistics in the
    table's ``CacheParams``, or as many, as TorchRec takes it."""
    if part == 1:
        return 1.0
    stats = None if option.cache_params is None else option.cache_params.stats
    return part if stats is None else 1 - stats.expected_miss_rate(part)


@functools.cache
def plan_stored_tables() -> None:
    """Let TorchRec's planners count what torchembed's tables in host memory and on disk take there
    and in their caches on the device, and the time of those on disk and of those whose config has a
    storage. Estimates of other tables stay as they are. A second call does nothing."""
    EmbeddingEnumerator.populate_estimates = _with_stored_tables(
        EmbeddingEnumerator.populate_estimates
    )
