"""TorchRec's four embedding kernels over torchembed's tables."""

import dataclasses
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from typing import Any, Generic, TypeAlias, TypedDict, TypeVar, cast

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import Tensor, nn
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
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import data_type_to_sparse_type
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchembed.core.types import Pooling
from torchembed.integrations.torchrec.plans.disk import disk_settings, make_folder
from torchembed.integrations.torchrec.plans.dynamic_tables import dynamic_settings
from torchembed.integrations.torchrec.plans.settings import output_dtype, update_settings
from torchembed.integrations.torchrec.plans.storages import initializers_on_disk, storages
from torchembed.integrations.torchrec.tables.dense_tables import DenseTables
from torchembed.integrations.torchrec.tables.disk_tables import DiskTables
from torchembed.integrations.torchrec.tables.fused_tables import FusedTables
from torchembed.integrations.torchrec.tables.host_tables import HostTables
from torchembed.integrations.torchrec.versions import dense_parameters_by_table
from torchembed.tables import IdShare, Table, TableSpec

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
    tables, dynamic, initializers = [], dynamic_settings(config), initializers_on_disk(config)
    for table, storage in zip(config.embedding_tables, storages(config), strict=True):
        metadata: ShardMetadata | None = table.local_metadata
        row, column = (0, 0) if metadata is None else metadata.shard_offsets
        spec = TableSpec(
            name=table.name,
            num_rows=table.num_embeddings,
            dim=table.embedding_dim,
            dtype=dtype,
            storage=storage,
        )
        if initializers is not None:
            spec = dataclasses.replace(spec, initializer=initializers[table.name])
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


_Held = TypeVar("_Held", FusedTables, DenseTables)


class _TablesKernel(BaseEmbedding, Generic[_Held]):
    """A kernel over tables of torchembed, which it makes where TorchRec's makes FBGEMM's."""

    _feature_table_map: list[int]
    init_parameters: Callable[[], None]

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
        *sharding_type: ShardingType | None,
    ) -> None:
        # The __init__ of TorchRec's kernel would allocate FBGEMM's tables; that of its base does
        # not.
        base = BaseBatchedEmbeddingBag if self._is_pooled else BaseBatchedEmbedding
        base.__init__(self, config, pg, device, *sharding_type)  # type: ignore[arg-type]
        self._make_tables(self._table_arguments(), device or torch.device("cpu"), pg)
        if initializers_on_disk(config) is None:  # else rows get their values when they are used
            self.init_parameters()

    @property
    def _is_pooled(self) -> bool:
        return isinstance(self, BaseBatchedEmbeddingBag)

    def _table_arguments(self) -> _TableArguments:
        config = self.config
        precision: SparseType = data_type_to_sparse_type(config.data_type)
        pooling = self._pooling if isinstance(self, BaseBatchedEmbeddingBag) else PoolingMode.NONE
        return {
            "tables": _local_tables(config, precision.as_dtype()),
            "feature_tables": self._feature_table_map,
            "pooling": _POOLINGS[pooling],
            "precision": precision,
            "output_dtype": output_dtype(config),
        }

    def _make_tables(
        self, arguments: _TableArguments, device: torch.device, pg: dist.ProcessGroup | None
    ) -> None:
        """Set what TorchRec's kernel sets of its tables."""
        raise NotImplementedError

    @property
    def tables(self) -> _Held:
        """The tables that the kernel looks up in."""
        return cast("_Held", self._emb_module)

    def forward(self, features: KeyedJaggedTensor, *_: object) -> Tensor:
        """The vectors of ``features``, ``[B, columns]`` or, without pooling, ``[L, D]``.

        Weights of ``features``, if floating point, multiply the vectors that are pooled.
        """
        weights = features.weights_or_none() if self._is_pooled else None
        if weights is not None:
            # TorchRec keeps other things in weights that are no floating point numbers.
            weights = weights.float() if weights.is_floating_point() else None
        return self.tables(features.values(), features.offsets(), weights)


class _FusedKernel(_TablesKernel[FusedTables]):
    """A kernel whose backward updates the tables."""

    def _make_tables(
        self, arguments: _TableArguments, device: torch.device, pg: dist.ProcessGroup | None
    ) -> None:
        config, settings = self.config, disk_settings(self.config)
        if settings is not None:
            make_folder(settings)
        kind = FusedTables
        if any(storage is not None for storage in storages(config)):
            kind = HostTables if initializers_on_disk(config) is None else DiskTables
        tables = kind(**arguments, device=device, settings=update_settings(config))
        self._emb_module, self._group = tables, pg
        self._optim = EmbeddingFusedOptimizer(config, tables, pg)  # type: ignore[arg-type]
        if isinstance(tables, HostTables) and not isinstance(tables, DiskTables):
            of_tables = self._optim.state.items()
            self._optim.state = {table: _StatesOfTable(s, tables) for table, s in of_tables}

    def named_parameters_by_table(self) -> Iterator[tuple[str, Any]]:
        """The weight of each table, with the optimizer that updates it in backward."""
        tables = self.tables
        if not isinstance(tables, DiskTables):
            # Views of flat memory, which tables on disk have none of.
            yield from super().named_parameters_by_table()  # type: ignore[misc]
            return
        for name in dict.fromkeys(table.name for table in self.config.embedding_tables):
            weight = nn.Parameter(tables.weight_of(name))
            optimizer = EmbeddingFusedOptimizer(
                self.config,
                tables,  # type: ignore[arg-type]
                self._group,
                create_for_table=name,
                param_weight_for_table=weight,
            )
            weight._in_backward_optimizers = [optimizer]  # type: ignore[attr-defined]
            yield name, weight


class DenseKernel(_TablesKernel[DenseTables]):
    """A kernel whose tables get ordinary gradients."""

    table_name_to_count: dict[str, int]

    def _make_tables(
        self, arguments: _TableArguments, device: torch.device, pg: dist.ProcessGroup | None
    ) -> None:
        tables, counts = DenseTables(**arguments, device=device), self.table_name_to_count.copy()
        self._emb_module = tables
        by_table = dense_parameters_by_table(tables, counts, self.config)  # type: ignore[arg-type]
        self._param_per_table = dict(by_table)

    def parameter_of(self, table: str) -> Tensor:
        """The parameter that TorchRec's optimizers know for ``table``."""
        return self._param_per_table[table]


class FusedBags(_FusedKernel, BatchedFusedEmbeddingBag):
    """Kernel of pooled vectors whose backward updates the tables."""


class DenseBags(DenseKernel, BatchedDenseEmbeddingBag):
    """Kernel of pooled vectors whose tables get ordinary gradients."""


class FusedSequences(_FusedKernel, BatchedFusedEmbedding):
    """Kernel of a vector for each id whose backward updates the tables."""


class DenseSequences(DenseKernel, BatchedDenseEmbedding):
    """Kernel of a vector for each id whose tables get ordinary gradients."""


Kernel: TypeAlias = FusedBags | DenseBags | FusedSequences | DenseSequences
