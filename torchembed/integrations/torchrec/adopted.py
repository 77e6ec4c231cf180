"""TorchRec's sharded collections as collections of ours, over the same tables: what a pipeline of
ours trains. Weights, optimizer states and learning rates are shared, not copied."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.types import ShardingType
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from torchembed.core.features import SparseFeatures
from torchembed.core.types import OnBadId
from torchembed.integrations.torchrec.settings import output_dtype
from torchembed.integrations.torchrec.sharded import (
    ShardedEmbeddingBagCollection as TorchrecBags,
)
from torchembed.integrations.torchrec.sharded import (
    ShardedEmbeddingCollection as TorchrecSequences,
)
from torchembed.integrations.torchrec.tables import BatchedTables, FusedTables
from torchembed.integrations.torchrec.versions import grouped_configs
from torchembed.modules.collection import FeatureSlots
from torchembed.modules.configs import EmbeddingBagConfig, EmbeddingConfig, as_config
from torchembed.modules.embedding_collection import SequenceVectors
from torchembed.modules.sharded_collection import ShardedCollection
from torchembed.modules.sharded_embedding_bag_collection import ShardedEmbeddingBagCollection
from torchembed.modules.sharded_embedding_collection import ShardedEmbeddingCollection
from torchembed.modules.staged_collection import StagedCollection
from torchembed.modules.table_module import TableWeight
from torchembed.ops.row_gradients import WeightGradient
from torchembed.sharding.planning.plan import Placement, Shard, TablePlan
from torchembed.sharding.transport.layout import SlotPart
from torchembed.sharding.transport.ranks import Ranks
from torchembed.tables import Table, TableSet


def kernels_of(sharded: Any) -> list[Any]:
    """TorchRec's kernels on this rank, that hold our tables."""
    lookups = (
        lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
        for lookup in sharded._lookups
    )
    return [kernel for lookup in lookups for kernel in lookup._emb_modules]


def tables_of(sharded: Any) -> list[BatchedTables]:
    """The tables of each kernel."""
    return [kernel._emb_module for kernel in kernels_of(sharded)]


def plan_of(name: str, dim: int, num_rows: int, num_ranks: int, sharding: Any) -> TablePlan:
    """TorchRec's plan of a table, in our terms."""
    kind = sharding.sharding_type
    by_column = kind == ShardingType.TABLE_COLUMN_WISE.value
    placement = Placement.COLUMN_WISE if by_column else Placement(kind)
    if placement is Placement.DATA_PARALLEL:
        sizes = {"first_row": 0, "num_rows": num_rows, "first_column": 0, "num_columns": dim}
        return TablePlan(
            table=name,
            placement=placement,
            shards=tuple(Shard(rank=rank, **sizes) for rank in range(num_ranks)),
        )
    shards = []
    for shard in sharding.sharding_spec.shards:
        (first_row, first_column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
        if rows and columns:
            shards.append(
                Shard(
                    rank=shard.placement.rank(),
                    first_row=first_row,
                    num_rows=rows,
                    first_column=first_column,
                    num_columns=columns,
                )
            )
    return TablePlan(table=name, placement=placement, shards=tuple(shards))


def plans_of(sharded: Any, configs: Iterable[Any]) -> list[TablePlan]:
    """The plans of the tables ``configs``."""
    return [
        plan_of(
            config.name,
            config.embedding_dim,
            config.num_embeddings,
            sharded._env.world_size,
            sharded.module_sharding_plan[config.name],
        )
        for config in configs
    ]


def _bounds_check(held: Sequence[BatchedTables]) -> BoundsCheckMode:
    """Of tables whose settings differ, the stricter."""
    modes = {tables.bounds_check for tables in held if isinstance(tables, FusedTables)}
    strict = (BoundsCheckMode.FATAL, BoundsCheckMode.WARNING, BoundsCheckMode.IGNORE)
    return next((mode for mode in strict if mode in modes), BoundsCheckMode.NONE)


class _Adopted(ShardedCollection):
    """A collection over the tables of one of TorchRec's."""

    def _adopt(self, sharded: Any, configs: Sequence[EmbeddingConfig], ranks: Ranks) -> None:
        StagedCollection.__init__(self)
        held = tables_of(sharded)
        self._bounds_check = _bounds_check(held)
        is_fatal = self._bounds_check is BoundsCheckMode.FATAL
        on_bad_id = OnBadId.RAISE if is_fatal else OnBadId.ZERO
        self._settle(configs, plans_of(sharded, configs), ranks, on_bad_id)
        self._table_set = TableSet.over([g for tables in held for g in tables.groups])
        numbers = {config.name: number for number, config in enumerate(configs)}
        self._local: dict[int, Table] = {}
        self._by_column: dict[tuple[int, int], Table] = {}
        """By their number and first column, since a rank may hold columns of one table twice."""
        for table in self._table_set.tables:
            number = numbers[table.spec.name]
            self._local[number] = self._by_column[number, table.first_column] = table
        setattr(self, self._container, self._table_weights())
        device = sharded._device
        self._num_bad = torch.zeros((), dtype=torch.int64, device=device)
        self._assign_slots(device)

    def _table_weights(self) -> nn.ModuleDict:
        return nn.ModuleDict({name: TableWeight(table) for name, table in self._named_tables()})

    def _named_tables(self) -> list[tuple[str, Table]]:
        return [(f"{t.spec.name}_{t.first_column}", t) for t in self._table_set.tables]

    def _holders(self) -> Iterable[tuple[Table, nn.Module]]:
        weights = self.get_submodule(self._container)
        return ((table, weights.get_submodule(name)) for name, table in self._named_tables())

    def _table_of(self, part: SlotPart) -> Table:
        number = self._feature_slots.tables[part.slot]
        return self._by_column[number, part.shards[0].first_column]

    def _checked(self, batch: SparseFeatures) -> SparseFeatures:
        """As FBGEMM does: a bad id counts as id 0, and -1 for nothing."""
        checked = super()._checked(batch)
        if self._bounds_check in (BoundsCheckMode.FATAL, BoundsCheckMode.NONE):
            return checked
        is_bad = (checked.values < 0) & (batch.values != -1)
        if batch.offsets is not None:
            # There may be spare ones behind the bags.
            positions = torch.arange(batch.values.numel(), device=batch.values.device)
            is_bad &= positions < batch.offsets[-1:]
        self._num_bad += is_bad.sum()
        return SparseFeatures(
            keys=checked.keys,
            values=checked.values.masked_fill(is_bad, 0),
            batch_size=checked.batch_size,
            offsets=checked.offsets,
            hotness=checked.hotness,
            weights=checked.weights,
        )

    def take_num_bad(self) -> int:
        """How many bad ids there were since the last call that FBGEMM would have warned of; waits
        for the device."""
        number = int(self._num_bad)
        self._num_bad.zero_()
        return number if self._bounds_check is BoundsCheckMode.WARNING else 0


class AdoptedBags(_Adopted, ShardedEmbeddingBagCollection):
    """Gives what ``sharded``, one of TorchRec's over our tables, gives for this rank's samples."""

    def __init__(self, sharded: TorchrecBags, ranks: Ranks) -> None:
        names = _names_of(sharded)
        self._adopt(sharded, _in_order(sharded._embedding_bag_configs, names), ranks)
        self.reserved_columns = 0
        (dtype,) = output_dtypes(sharded)
        self._look_up_as(sharded._is_weighted, dtype, WeightGradient.DENSE)
        self._names = names
        self._order = [self._feature_slots.names.index(name) for name in names]
        self._output_widths = [self._widths[slot] for slot in self._order]

    def _result(self, features: Any, vectors: Tensor) -> KeyedTensor:
        if self._order != sorted(self._order):
            columns = vectors.split(self._widths, dim=1)
            vectors = torch.cat([columns[slot] for slot in self._order], dim=1)
        return KeyedTensor(self._names, self._output_widths, vectors, key_dim=1)


class AdoptedSequences(_Adopted, ShardedEmbeddingCollection):
    """Gives what ``sharded``, one of TorchRec's over our tables, gives for this rank's samples."""

    def __init__(self, sharded: TorchrecSequences, ranks: Ranks) -> None:
        configs = [as_config(c, EmbeddingConfig) for c in sharded._embedding_configs]
        self._adopt(sharded, configs, ranks)
        (dtype,) = output_dtypes(sharded)
        self._look_up_as(dtype, WeightGradient.DENSE)
        slots = self._feature_slots.names
        self._slots_of_names = {name: slots.index(name) for name in _names_of(sharded)}

    def _result(self, features: Any, vectors: SequenceVectors) -> dict[str, JaggedTensor]:
        found = {}
        for name, slot in self._slots_of_names.items():
            values, offsets = vectors[slot]
            found[name] = JaggedTensor(values=values, offsets=offsets)
        return found


def output_dtypes(sharded: Any) -> set[torch.dtype]:
    """Of the vectors of all ranks' kernels."""
    configs = grouped_configs(shardings_of(sharded))
    return {output_dtype(config.fused_params or {}) for config in configs}


def shardings_of(sharded: Any) -> list[Any]:
    """One for each kind of placement."""
    is_pooled = isinstance(sharded, TorchrecBags)
    by_type = None if is_pooled else sharded._sharding_type_to_sharding
    return sharded._embedding_shardings if by_type is None else list(by_type.values())


def _names_of(sharded: Any) -> list[str]:
    """Of its results, in their order."""
    names = (name for sharding in shardings_of(sharded) for name in sharding.embedding_names())
    return list(dict.fromkeys(names))


def _in_order(configs: Iterable[Any], names: Sequence[str]) -> list[EmbeddingBagConfig]:
    """``configs`` of ours, as far as can be in the order in which ``names`` has their results."""
    ours: list[Any] = [as_config(config, EmbeddingBagConfig) for config in configs]
    slots = FeatureSlots(ours)
    tables = [slots.tables[slots.names.index(name)] for name in names]
    return [ours[table] for table in dict.fromkeys(tables)]


def adopted(sharded: Any, ranks: Ranks) -> AdoptedBags | AdoptedSequences:
    """A collection of ours over the tables of ``sharded``."""
    kind = AdoptedBags if isinstance(sharded, TorchrecBags) else AdoptedSequences
    return kind(sharded, ranks)  # type: ignore[arg-type]
