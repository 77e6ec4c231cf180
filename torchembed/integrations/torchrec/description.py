"""Public description of TorchRec's sharded collections over torchembed's tables."""

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchembed.integrations.torchrec.dynamic_tables import is_dynamic
from torchembed.integrations.torchrec.index_state import IndexedTables
from torchembed.integrations.torchrec.kernels import Kernel
from torchembed.integrations.torchrec.lookups import PooledLookup, SequenceLookup
from torchembed.integrations.torchrec.settings import output_dtype
from torchembed.integrations.torchrec.tables import BatchedTables
from torchembed.integrations.torchrec.versions import Sharding, grouped_configs
from torchembed.sharding.planning.plan import Placement, Shard, TablePlan
from torchembed.tables import Table


class DescribedCollection:
    """Base of the sharded collections: what a pipeline needs to know of one.

    Subclasses give the first five properties and the device from TorchRec's attributes; the others
    follow.
    """

    @property
    def sharding_env(self) -> ShardingEnv:
        """TorchRec's record of the ranks."""
        raise NotImplementedError

    @property
    def type_shardings(self) -> Sequence[Sharding]:
        """TorchRec's shardings, one for each sharding type."""
        raise NotImplementedError

    @property
    def lookups(self) -> Sequence[PooledLookup | SequenceLookup]:
        """The lookup of each sharding, without DDP around that of data-parallel tables."""
        raise NotImplementedError

    @property
    def table_configs(self) -> Sequence[BaseEmbeddingConfig]:
        """The configs of all tables."""
        raise NotImplementedError

    @property
    def table_shardings(self) -> dict[str, ParameterSharding]:
        """TorchRec's plan of each table."""
        raise NotImplementedError

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that the tables are sharded over."""
        group = self.sharding_env.process_group
        assert group is not None  # a collection without one stays TorchRec's
        return group

    @property
    def device(self) -> torch.device:
        """The device of this rank's tables."""
        raise NotImplementedError

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

    def reset_dynamic_tables(self) -> None:
        """Give rows of dynamic tables the initial values that their ids have."""
        for tables in self.tables:
            if tables.dynamic_rows is not None:
                tables.dynamic_rows.reset()

    def indexed_tables(self, container: str) -> IndexedTables:
        """The dynamic tables as state dicts have them, where ``container`` holds the weights."""
        return IndexedTables(
            container, self.dynamic_tables, self.table_shardings, self.sharding_env
        )

    @property
    def table_plans(self) -> list[TablePlan]:
        """The plan of each of ``table_configs``, as torchembed describes plans."""
        num_ranks = self.sharding_env.world_size
        return [
            _table_plan(config, self.table_shardings[config.name], num_ranks)
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
    config: BaseEmbeddingConfig, sharding: ParameterSharding, num_ranks: int
) -> TablePlan:
    """Translate TorchRec's plan of a table."""
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
    )
