"""TorchRec's four embedding kernels over our tables."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import Tensor
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
from torchembed.integrations.torchrec.settings import output_dtype, update_settings
from torchembed.integrations.torchrec.shared_rows import Rows
from torchembed.integrations.torchrec.tables import DenseTables, FusedTables
from torchembed.integrations.torchrec.versions import dense_parameters_by_table
from torchembed.tables import Table, TableSpec

_POOLINGS = {
    PoolingMode.SUM: Pooling.SUM,
    PoolingMode.MEAN: Pooling.MEAN,
    PoolingMode.NONE: None,
}


def _tables(config: GroupedEmbeddingConfig, dtype: torch.dtype) -> list[Table]:
    """What ``config`` says that this rank holds."""
    tables = []
    for table in config.embedding_tables:
        metadata: Any = table.local_metadata
        row, column = (0, 0) if metadata is None else metadata.shard_offsets
        spec = TableSpec(
            name=table.name, num_rows=table.num_embeddings, dim=table.embedding_dim, dtype=dtype
        )
        tables.append(
            Table(
                spec,
                first_row=row,
                num_rows=table.local_rows,
                first_column=column,
                num_columns=table.local_cols,
            )
        )
    return tables


def _shape(
    config: GroupedEmbeddingConfig, pooling: PoolingMode, feature_tables: Sequence[int]
) -> dict[str, Any]:
    """What fused and dense tables are both made from."""
    precision: SparseType = data_type_to_sparse_type(config.data_type)
    return {
        "tables": _tables(config, precision.as_dtype()),
        "feature_tables": feature_tables,
        "pooling": _POOLINGS[pooling],
        "precision": precision,
        "output_dtype": output_dtype(config.fused_params or {}),
    }


def _make_fused(
    kernel: Any,
    pg: dist.ProcessGroup | None,
    device: torch.device,
    pooling: PoolingMode,
    memory: Rows | None = None,
) -> None:
    """The rest of a fused kernel's ``__init__``, where TorchRec's would make FBGEMM's tables."""
    config = kernel.config
    settings = update_settings(config.fused_params or {})
    tables: Any = FusedTables(
        **_shape(config, pooling, kernel._feature_table_map),
        device=device,
        settings=settings,
        memory=memory,
    )
    kernel._emb_module = tables
    kernel._optim = EmbeddingFusedOptimizer(config, tables, pg)
    kernel.init_parameters()


def _make_dense(kernel: Any, device: torch.device, pooling: PoolingMode) -> None:
    """As :func:`_make_fused`, of a kernel whose tables have ordinary gradients."""
    config = kernel.config
    tables: Any = DenseTables(**_shape(config, pooling, kernel._feature_table_map), device=device)
    counts = kernel.table_name_to_count.copy()
    kernel._emb_module = tables
    kernel._param_per_table = dict(dense_parameters_by_table(tables, counts, config))
    kernel.init_parameters()


def tables_of_all(configs: Sequence[GroupedEmbeddingConfig], device: torch.device) -> FusedTables:
    """The tables of kernels that differ in their tables alone, of summed vectors."""
    tables = [table for config in configs for table in config.embedding_tables]
    merged = dataclasses.replace(configs[0], embedding_tables=tables)
    feature_tables = [n for n, table in enumerate(tables) for _ in range(table.num_features())]
    return FusedTables(
        **_shape(merged, PoolingMode.SUM, feature_tables),
        device=device,
        settings=update_settings(merged.fused_params or {}),
    )


def look_up(tables: Any, features: KeyedJaggedTensor, *, weighted: bool) -> Tensor:
    """The vectors of ``features`` from a kernel's tables."""
    weights = features.weights_or_none() if weighted else None
    if weights is not None:
        # TorchRec keeps other things in weights that are no floating point numbers.
        weights = weights.float() if weights.is_floating_point() else None
    ids, offsets = features.values(), features.offsets()
    # FBGEMM's check of ids wants one type; ours takes either.
    return tables(ids, offsets.to(ids.dtype), weights)


class FusedBags(BatchedFusedEmbeddingBag):
    """Pooled vectors; backward updates the tables."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None,
        device: torch.device,
        sharding_type: ShardingType | None = None,
        memory: Rows | None = None,
    ) -> None:
        BaseBatchedEmbeddingBag.__init__(self, config, pg, device, sharding_type)
        _make_fused(self, pg, device, self._pooling, memory)

    def forward(self, features: KeyedJaggedTensor, *_: Any) -> Tensor:
        return look_up(self._emb_module, features, weighted=True)


class DenseBags(BatchedDenseEmbeddingBag):
    """Pooled vectors; the tables have ordinary gradients."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None,
        device: torch.device,
        sharding_type: ShardingType | None = None,
    ) -> None:
        BaseBatchedEmbeddingBag.__init__(self, config, pg, device, sharding_type)
        _make_dense(self, device, self._pooling)

    def forward(self, features: KeyedJaggedTensor, *_: Any) -> Tensor:
        return look_up(self._emb_module, features, weighted=True)


class FusedSequences(BatchedFusedEmbedding):
    """A vector for each id; backward updates the tables."""

    def __init__(
        self, config: GroupedEmbeddingConfig, pg: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        BaseBatchedEmbedding.__init__(self, config, pg, device)
        _make_fused(self, pg, device, PoolingMode.NONE)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return look_up(self._emb_module, features, weighted=False)


class DenseSequences(BatchedDenseEmbedding):
    """A vector for each id; the tables have ordinary gradients."""

    def __init__(
        self, config: GroupedEmbeddingConfig, pg: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        BaseBatchedEmbedding.__init__(self, config, pg, device)
        _make_dense(self, device, PoolingMode.NONE)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return look_up(self._emb_module, features, weighted=False)
