"""The base of TorchRec's two sharded collections over torchembed's tables."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torch.distributed.remote_device import _remote_device
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, ShardedEmbeddingModule
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchembed.integrations.torchrec.plans.disk import note_disk
from torchembed.integrations.torchrec.plans.dynamic_tables import is_dynamic, note_settings
from torchembed.integrations.torchrec.plans.given_storages import note_given_storages
from torchembed.integrations.torchrec.plans.host_memory import note_host_memory
from torchembed.integrations.torchrec.plans.settings import output_dtype
from torchembed.integrations.torchrec.plans.storages import initializers_on_disk, storages
from torchembed.integrations.torchrec.sharded.hashed_ids import with_hashed_ids
from torchembed.integrations.torchrec.sharded.index_state import IndexedTables, keep_in_state
from torchembed.integrations.torchrec.sharded.kernels import Kernel
from torchembed.integrations.torchrec.sharded.lookups import PooledLookup, SequenceLookup
from torchembed.integrations.torchrec.tables.batched_tables import BatchedTables
from torchembed.integrations.torchrec.tables.disk_tables import DiskTables
from torchembed.integrations.torchrec.versions import Sharding, grouped_configs
from torchembed.sharding.planning.plan import Placement, Shard, TablePlan
from torchembed.tables import Storage, Table


class CollectionBase(ShardedEmbeddingModule[Any, Any, Any, Any]):
    """Base of the sharded collections, before TorchRec's own class of each: what both do otherwise
    than TorchRec's, and what a pipeline needs to know of one.

    Subclasses name ``container`` and give ``type_shardings`` and ``table_configs`` from TorchRec's
    attributes; all else follows.
    """

    container: ClassVar[str]
    """The attribute that holds the tables' weights in state dicts."""
    module_sharding_plan: EmbeddingModuleShardingPlan
    _env: ShardingEnv
    _device: torch.device | None

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        indexed = IndexedTables(
            self.container, self.dynamic_tables, self.table_shardings, self.sharding_env
        )
        keep_in_state(self, indexed)

    @classmethod
    def create_grouped_sharding_infos(
        cls, module: Any, *arguments: Any, **settings: Any
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        infos = super().create_grouped_sharding_infos(module, *arguments, **settings)  # type: ignore[misc]
        every_info = list(itertools.chain(*infos.values()))
        note_settings(every_info, module)
        note_host_memory(every_info)
        note_disk(every_info, module)
        note_given_storages(every_info, module)
        return infos

    def reset_parameters(self) -> None:
        """Give all rows their initial values again."""
        with self._disk_tables_as(EmbeddingComputeKernel.KEY_VALUE):
            super().reset_parameters()  # type: ignore[misc]
        for tables in self.tables:
            if tables.dynamic_rows is not None:
                tables.dynamic_rows.reset()
            elif isinstance(tables, DiskTables):
                tables.reset_rows()

    def _initialize_torch_state(self, *arguments: Any, **settings: Any) -> None:
        # TorchRec takes snapshots of its own tables on disk for state dicts; ours are tensors, as
        # those of other kernels are.
        with self._disk_tables_as(EmbeddingComputeKernel.FUSED):
            super()._initialize_torch_state(*arguments, **settings)  # type: ignore[misc]

    @contextlib.contextmanager
    def _disk_tables_as(self, kernel: EmbeddingComputeKernel) -> Iterator[None]:
        """A context in which TorchRec finds ``kernel`` in its plan of tables on disk."""
        before = self.module_sharding_plan
        on_disk = {
            table.name
            for config in grouped_configs(self.type_shardings)
            if initializers_on_disk(config) is not None
            for table in config.embedding_tables
        }
        self.module_sharding_plan = EmbeddingModuleShardingPlan(
            {
                name: dataclasses.replace(sharding, compute_kernel=kernel.value)
                if name in on_disk
                else sharding
                for name, sharding in before.items()
            }
        )
        try:
            yield
        finally:
            self.module_sharding_plan = before

    def _create_input_dist(self, *arguments: Any, **settings: Any) -> None:
        super()._create_input_dist(*arguments, **settings)  # type: ignore[misc]
        self._input_dists = with_hashed_ids(self._input_dists, self.type_shardings)

    @property
    def sharding_env(self) -> ShardingEnv:
        """TorchRec's record of the ranks."""
        return self._env

    @property
    def type_shardings(self) -> Sequence[Sharding]:
        """TorchRec's shardings, one for each sharding type."""
        raise NotImplementedError

    @property
    def lookups(self) -> Sequence[PooledLookup | SequenceLookup]:
        """The lookup of each sharding, without DDP around that of data-parallel tables."""
        without_ddp = (
            lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
            for lookup in self._lookups
        )
        return cast("list[PooledLookup | SequenceLookup]", list(without_ddp))

    @property
    def table_configs(self) -> Sequence[BaseEmbeddingConfig]:
        """The configs of all tables."""
        raise NotImplementedError

    @property
    def table_shardings(self) -> dict[str, ParameterSharding]:
        """TorchRec's plan of each table."""
        return self.module_sharding_plan

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that the tables are sharded over."""
        group = self.sharding_env.process_group
        assert group is not None  # a collection without one stays TorchRec's
        return group

    @property
    def device(self) -> torch.device:
        """The device of this rank's tables."""
        return torch.device(self._device or "cpu")

    @property
    def kernels(self) -> list[Kernel]:
        """The kernels of this rank."""
        return [kernel for lookup in self.lookups for kernel in lookup.kernels]

    @property
    def tables(self) -> list[BatchedTables]:
        """The tables of each kernel of this rank."""
        return [kernel.tables for kernel in self.kernels]

    @property
    def dynamic_tables(self) -> dict[str, list[Table]]:
        """The dynamic tables that this rank holds, by name; several of one name are columns of
        it."""
        found: dict[str, list[Table]] = {}
        for tables in self.tables:
            if tables.dynamic_rows is not None:
                for group in tables.groups:
                    for table in group.tables:
                        found.setdefault(table.spec.name, []).append(table)
        return found

    @property
    def table_plans(self) -> list[TablePlan]:
        """The plan of each of ``table_configs``, as torchembed describes plans."""
        num_ranks, found = self.sharding_env.world_size, dict[str, Storage | None]()
        for kernel in grouped_configs(self.type_shardings):
            for table, storage in zip(kernel.embedding_tables, storages(kernel), strict=True):
                found.setdefault(table.name, storage)
        return [
            _table_plan(
                config, self.table_shardings[config.name], num_ranks, found.get(config.name)
            )
            for config in self.table_configs
        ]

    @property
    def output_dtypes(self) -> set[torch.dtype]:
        """The dtypes of the vectors of all ranks' kernels."""
        return set(map(output_dtype, grouped_configs(self.type_shardings)))

    @property
    def output_names(self) -> list[str]:
        """The names of the results, in their order."""
        names = (name for sharding in self.type_shardings for name in sharding.embedding_names())
        return list(dict.fromkeys(names))


def _table_plan(
    config: BaseEmbeddingConfig,
    sharding: ParameterSharding,
    num_ranks: int,
    storage: Storage | None,
) -> TablePlan:
    """Translate TorchRec's plan of a table, whose ``storage`` is that of the first rank with a part
    of it."""
    kind = sharding.sharding_type
    by_column = kind == ShardingType.TABLE_COLUMN_WISE.value
    placement = Placement.COLUMN_WISE if by_column else Placement(kind)
    if placement is Placement.DATA_PARALLEL:
        shards = [
            Shard(
                rank=rank,
                first_row=0,
                num_rows=config.num_embeddings,
                first_column=0,
                num_columns=config.embedding_dim,
            )
            for rank in range(num_ranks)
        ]
        return TablePlan(table=config.name, placement=placement, shards=tuple(shards))
    shards = []
    for shard in cast("EnumerableShardingSpec", sharding.sharding_spec).shards:
        (first_row, first_column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
        rank = cast("_remote_device", shard.placement).rank()
        if rows and columns:
            assert rank is not None
            shards.append(
                Shard(
                    rank=rank,
                    first_row=first_row,
                    num_rows=rows,
                    first_column=first_column,
                    num_columns=columns,
                )
            )
    return TablePlan(
        table=config.name,
        placement=placement,
        shards=tuple(shards),
        takes_any_id=is_dynamic(config),
        storage=storage,
    )
