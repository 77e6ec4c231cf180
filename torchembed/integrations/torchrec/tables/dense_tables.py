"""Tables of TorchRec's kernels that ordinary optimizers train."""

from collections.abc import Sequence

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import Tensor, nn

from torchembed.core.types import Pooling
from torchembed.integrations.torchrec.tables.batched_tables import BatchedTables, LookupSource
from torchembed.tables import Table


class DenseTables(BatchedTables):
    """Tables with an ordinary gradient, as ``DenseTableBatchedEmbeddingBagsCodegen`` has them.

    The parameter ``weights [elements]`` holds them all. See :class:`BatchedTables` for arguments.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        feature_tables: Sequence[int],
        pooling: Pooling | None,
        precision: SparseType,
        output_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        num_elements = sum(table.num_rows * table.num_columns for table in tables)
        # Drawn as FBGEMM draws it, so that later random numbers are the same.
        flat = torch.randn(num_elements, dtype=precision.as_dtype(), device=device)
        super().__init__(tables, feature_tables, flat, device, pooling, precision, output_dtype)
        self.weights = nn.Parameter(flat)
        self.embedding_specs = [(table.num_rows, table.num_columns) for table in tables]

    def forward(self, ids: Tensor, offsets: Tensor, per_id_weights: Tensor | None = None) -> Tensor:
        return self._look_up(ids, offsets, per_id_weights)

    def _source(self, number: int, rows: Tensor) -> LookupSource:
        begin, end = self._flat.spans[number]
        weight = self.weights[begin:end].view(-1, self.groups[number].weight.shape[1])
        return LookupSource(weight, rows, None)
