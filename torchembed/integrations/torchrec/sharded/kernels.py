"""TorchRec's four embedding kernels over torchembed's tables."""

import dataclasses
from collections.abc import ItemsView, Mapping, Sequence, ValuesView
from typing import Any, TypeAlias, TypedDict, cast

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torchrec.distributed.batched_embedding_kernel import (
    BaseBatchedEmbedding,
    BaseBatchedEmbeddingBag,
    BatchedDenseEmbedding,
    BatchedDenseEmbeddingBag,
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
    EmbeddingFusedOptimizer,
)
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import data_type_to_sparse_type
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchembed.core.types import Pooling
from torchembed.integrations.torchrec.plans.dynamic_tables import dynamic_settings
from torchembed.integrations.torchrec.plans.host_memory import (
    in_host_memory,
    load_factor,
    shared_cache,
)
from torchembed.integrations.torchrec.plans.settings import output_dtype, update_settings
from torchembed.integrations.torchrec.tables.dense_tables import DenseTables
from torchembed.integrations.torchrec.tables.fused_tables import FusedTables
from torchembed.integrations.torchrec.tables.host_tables import HostTables
from torchembed.integrations.torchrec.versions import dense_parameters_by_table
from torchembed.tables import HostMemory, IdShare, Table, TableSpec

_POOLINGS = {
    PoolingMode.SUM: Pooling.SUM,
    PoolingMode.MEAN: Pooling.MEAN,
    PoolingMode.NONE: None,
}


class _TableArguments(TypedDict):
    """Arguments that fused and dense tables have in common."""

    tables: Sequence[Table]
    feature_tables: Sequence[int]
    pooling: Pooling | None
    precision: SparseType
    output_dtype: torch.dtype


def _local_tables(config: GroupedEmbeddingConfig, dtype: torch.dtype) -> list[Table]:
    """This rank's shards of the tables of ``config``."""
    tables, dynamic = [], dynamic_settings(config)
    storages = _storages(config)
    for table, storage in zip(config.embedding_tables, storages, strict=True):
        metadata: ShardMetadata | None = table.local_metadata
        row, column = (0, 0) if metadata is None else metadata.shard_offsets
        spec = TableSpec(
            name=table.name,
            num_rows=table.num_embeddings,
            dim=table.embedding_dim,
            dtype=dtype,
            storage=storage,
        )
        if dynamic is not None:
            spec = dataclasses.replace(dynamic.specs[table.name], num_rows=table.num_embeddings)
        made = Table(
            spec,
            first_row=row,
            num_rows=table.local_rows,
            first_column=column,
            num_columns=table.local_cols,
        )
        if dynamic is not None:
            # Where a hash divides the ids, the ranks have equally many rows.
            made.id_share = IdShare(
                row // table.local_rows, table.num_embeddings // table.local_rows
            )
        tables.append(made)
    return tables


def _storages(config: GroupedEmbeddingConfig) -> list[HostMemory | None]:
    """Where the rows of each table of ``config`` live; equal for tables of one width, which share a
    cache."""
    tables = config.embedding_tables
    if not in_host_memory(config):
        return [None] * len(tables)
    by_width: dict[int, HostMemory] = {}
    for width in {table.local_cols for table in tables}:
        members = [table for table in tables if table.local_cols == width]
        by_width[width] = shared_cache(
            [table.local_rows for table in members],
            [load_factor(table.fused_params) for table in members],
        )
    return [by_width[table.local_cols] for table in tables]


def _table_arguments(
    config: GroupedEmbeddingConfig, pooling: PoolingMode, feature_tables: Sequence[int]
) -> _TableArguments:
    precision: SparseType = data_type_to_sparse_type(config.data_type)
    return {
        "tables": _local_tables(config, precision.as_dtype()),
        "feature_tables": feature_tables,
        "pooling": _POOLINGS[pooling],
        "precision": precision,
        "output_dtype": output_dtype(config),
    }


class _StatesOfTable(dict[str, Any]):
    """Names and tensors of a table's optimizer states, which are up to date when they are read."""

    def __init__(self, states: Mapping[str, Any], tables: HostTables) -> None:
        super().__init__(states)
        self._tables = tables

    def __getitem__(self, name: str) -> Any:
        self._tables.flush()
        return super().__getitem__(name)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        self._tables.flush()
        return super().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        self._tables.flush()
        return super().values()


def _make_fused(
    kernel: "FusedBags | FusedSequences",
    pg: dist.ProcessGroup | None,
    device: torch.device | None,
    pooling: PoolingMode,
) -> None:
    """Finish a fused kernel's ``__init__``, where TorchRec's own would make FBGEMM's tables."""
    config = kernel.config
    kind = HostTables if in_host_memory(config) else FusedTables
    tables = kind(
        **_table_arguments(config, pooling, kernel._feature_table_map),
        device=device or torch.device("cpu"),
        settings=update_settings(config),
    )
    kernel._emb_module = tables  # type: ignore[assignment]
    kernel._optim = EmbeddingFusedOptimizer(config, tables, pg)  # type: ignore[arg-type]
    if isinstance(tables, HostTables):
        of_tables = kernel._optim.state.items()
        kernel._optim.state = {table: _StatesOfTable(s, tables) for table, s in of_tables}
    kernel.init_parameters()


def _make_dense(
    kernel: "DenseBags | DenseSequences", device: torch.device | None, pooling: PoolingMode
) -> None:
    """Finish a dense kernel's ``__init__``, as :func:`_make_fused` does a fused one's."""
    config = kernel.config
    tables = DenseTables(
        **_table_arguments(config, pooling, kernel._feature_table_map),
        device=device or torch.device("cpu"),
    )
    counts = kernel.table_name_to_count.copy()
    kernel._emb_module = tables  # type: ignore[assignment]
    by_table = dense_parameters_by_table(tables, counts, config)  # type: ignore[arg-type]
    kernel._param_per_table = dict(by_table)
    kernel.init_parameters()


def look_up(
    tables: FusedTables | DenseTables, features: KeyedJaggedTensor, *, weighted: bool
) -> Tensor:
    """The vectors of ``features``, ``[B, columns]`` or, without pooling, ``[L, D]``.

    Args:
        weighted: whether the weights of ``features``, if floating point, multiply the vectors.
    """
    weights = features.weights_or_none() if weighted else None
    if weights is not None:
        # TorchRec keeps other things in weights that are no floating point numbers.
        weights = weights.float() if weights.is_floating_point() else None
    return tables(features.values(), features.offsets(), weights)


class FusedBags(BatchedFusedEmbeddingBag):
    """Kernel of pooled vectors whose backward updates the tables."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
        sharding_type: ShardingType | None = None,
    ) -> None:
        # BatchedFusedEmbeddingBag's own __init__ would allocate FBGEMM's tables.
        BaseBatchedEmbeddingBag.__init__(self, config, pg, device, sharding_type)
        _make_fused(self, pg, device, self._pooling)

    @property
    def tables(self) -> FusedTables:
        """The tables that the kernel looks up in."""
        return cast("FusedTables", self._emb_module)

    def forward(self, features: KeyedJaggedTensor, *_: object) -> Tensor:
        return look_up(self.tables, features, weighted=True)


class DenseBags(BatchedDenseEmbeddingBag):
    """Kernel of pooled vectors whose tables get ordinary gradients."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
        sharding_type: ShardingType | None = None,
    ) -> None:
        BaseBatchedEmbeddingBag.__init__(self, config, pg, device, sharding_type)
        _make_dense(self, device, self._pooling)

    @property
    def tables(self) -> DenseTables:
        """The tables that the kernel looks up in."""
        return cast("DenseTables", self._emb_module)

    def parameter_of(self, table: str) -> Tensor:
        """The parameter that TorchRec's optimizers know for ``table``."""
        return self._param_per_table[table]

    def forward(self, features: KeyedJaggedTensor, *_: object) -> Tensor:
        return look_up(self.tables, features, weighted=True)


class FusedSequences(BatchedFusedEmbedding):
    """Kernel of a vector for each id whose backward updates the tables."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
    ) -> None:
        BaseBatchedEmbedding.__init__(self, config, pg, device)
        _make_fused(self, pg, device, PoolingMode.NONE)

    @property
    def tables(self) -> FusedTables:
        """The tables that the kernel looks up in."""
        return cast("FusedTables", self._emb_module)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return look_up(self.tables, features, weighted=False)


class DenseSequences(BatchedDenseEmbedding):
    """Kernel of a vector for each id whose tables get ordinary gradients."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
    ) -> None:
        BaseBatchedEmbedding.__init__(self, config, pg, device)
        _make_dense(self, device, PoolingMode.NONE)

    @property
    def tables(self) -> DenseTables:
        """The tables that the kernel looks up in."""
        return cast("DenseTables", self._emb_module)

    def parameter_of(self, table: str) -> Tensor:
        """The parameter that TorchRec's optimizers know for ``table``."""
        return self._param_per_table[table]

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return look_up(self.tables, features, weighted=False)


Kernel: TypeAlias = FusedBags | DenseBags | FusedSequences | DenseSequences
