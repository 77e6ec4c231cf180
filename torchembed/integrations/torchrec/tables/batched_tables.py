"""torchembed's tables behind the part of FBGEMM's interface that TorchRec's kernels use.

``embedding_specs``, ``weights_precision``, ``weights_dev``, ``weights_host``,
``weights_physical_offsets``, ``split_embedding_weights``, ``get_optimizer_state``,
``set_learning_rate`` and the like have FBGEMM's names and signatures.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import Tensor, nn

from torchembed.core.features import SparseFeatures
from torchembed.core.types import OnBadId, Pooling
from torchembed.integrations.torchrec.tables.dynamic_rows import DynamicRows
from torchembed.integrations.torchrec.tables.flat_tables import FlatTables
from torchembed.modules.lookup.feature_selection import select_features
from torchembed.ops.linearize_ids import linearize_ids
from torchembed.ops.pooled_lookup import pooled_lookup
from torchembed.ops.row_gradients import GradientSink
from torchembed.ops.sequence_lookup import sequence_lookup
from torchembed.tables import MissingVectors, Table, TableGroup


class LookupSource(NamedTuple):
    """The memory that a lookup in a group reads, and what takes the gradients."""

    weight: Tensor
    """``[n, D]``, as autograd is to see it."""
    rows: Tensor
    """``[L]``, of ``weight``; -1 for none."""
    sink: GradientSink | None
    """Takes the gradients of the rows looked up; None for ordinary gradients of ``weight``."""


class BatchedTables(nn.Module):
    """The tables of one of TorchRec's kernels; each width is looked up in one call.

    Args:
        tables, feature_tables: see :class:`FlatTables`.
        flat, device: see :class:`FlatTables`, which says in which order ``flat`` has the rows.
        pooling: None for a vector for each id.
        precision: FBGEMM's name for the dtype of the rows.
        output_dtype: dtype of the vectors.

    Attributes:
        groups: a table group for each width.
        dynamic_rows: finds the rows of dynamic tables; None for static ones.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        feature_tables: Sequence[int],
        flat: Tensor,
        device: torch.device,
        pooling: Pooling | None,
        precision: SparseType,
        output_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self._tables = list(tables)
        self._flat = FlatTables(tables, feature_tables, flat.detach(), device)
        self.groups = self._flat.groups
        self._pooling = pooling
        self._output_dtype = output_dtype
        self.dynamic_rows: DynamicRows | None = None
        if tables and tables[0].spec.index.takes_any_id:
            self.dynamic_rows = DynamicRows(
                self.groups, tables, feature_tables, self._flat.rows_dtype
            )
        self.weights_precision = precision
        self.weights_physical_offsets = self._flat.offsets

    def split_embedding_weights(self) -> list[Tensor]:
        """Views of the rows of each table, ``[num_rows, num_columns]``."""
        split: list[Tensor] = [torch.empty(0)] * len(self._tables)
        for group in self.groups:
            for table in group.tables:
                split[self._tables.index(table)] = self._shown_rows(group, 0, table)
        return split

    def _source(self, number: int, rows: Tensor) -> LookupSource:
        """The memory that a lookup of ``rows [L]`` of group ``number`` reads."""
        raise NotImplementedError

    def _look_up(self, ids: Tensor, offsets: Tensor, per_id_weights: Tensor | None) -> Tensor:
        """Look up ``[B, sum of the features' columns]``, or ``[L, D]`` without pooling."""
        flat = self._flat
        num_features = flat.num_features
        batch_size = (offsets.numel() - 1) // num_features
        rows = self._rows(ids, offsets, batch_size)
        missing: list[MissingVectors | None] = [None] * len(self.groups)
        if self.dynamic_rows is not None:
            missing = self.dynamic_rows.missing(ids, offsets, batch_size, rows)
        if self._pooling is None:
            source, (missed,) = self._source(0, rows), missing
            look_up = functools.partial(
                sequence_lookup, source.weight, source.rows, sink=source.sink
            )
            return self._with_missing(look_up, sequence_lookup, missed)
        pool = functools.partial(pooled_lookup, batch_size=batch_size, pooling=self._pooling)
        features = SparseFeatures(
            keys=tuple(map(str, range(num_features))),
            values=rows,
            batch_size=batch_size,
            offsets=offsets,
            weights=per_id_weights,
        )
        columns: list[Tensor] = [rows] * num_features
        for group, (numbers, missed) in enumerate(zip(flat.features, missing, strict=True)):
            is_whole = len(self.groups) == 1
            selected = features if is_whole else select_features(features, numbers)
            of_group = functools.partial(
                pool,
                offsets=selected.offsets,
                num_features=len(numbers),
                per_id_weights=selected.weights,
            )
            if missed is not None and not is_whole:
                of_missing = dataclasses.replace(features, values=missed.rows)
                missed = missed._replace(rows=select_features(of_missing, numbers).values)
            source = self._source(group, selected.values)
            look_up = functools.partial(of_group, source.weight, source.rows, sink=source.sink)
            pooled = self._with_missing(look_up, of_group, missed)
            if is_whole:
                return pooled.flatten(1)
            for position, feature in enumerate(numbers):
                columns[feature] = pooled[:, position]
        return torch.cat(columns, dim=1)

    def _with_missing(
        self,
        look_up: Callable[..., Tensor],
        look_up_in: Callable[..., Tensor],
        missing: MissingVectors | None,
    ) -> Tensor:
        """The vectors of ``look_up``, with those of ids that have no row, by ``look_up_in``."""
        if missing is None:
            return look_up(output_dtype=self._output_dtype)
        # Both are added before they are rounded, as kernels add rows.
        summed_in = torch.promote_types(self._output_dtype, torch.float32)
        found = look_up(output_dtype=summed_in) + look_up_in(*missing, output_dtype=summed_in)
        return found.to(self._output_dtype)

    def _rows(self, ids: Tensor, offsets: Tensor, batch_size: int) -> Tensor:
        """The row of each of ``ids [L]`` in the weight of its group; -1 for none."""
        if self.dynamic_rows is not None:
            is_trained = self.training and torch.is_grad_enabled()
            return self.dynamic_rows.find(ids, offsets, batch_size, is_trained=is_trained)
        flat = self._flat
        return linearize_ids(
            ids,
            flat.first_rows,
            flat.num_rows,
            offsets=offsets,
            batch_size=batch_size,
            on_bad_id=OnBadId.ZERO,
            rows_dtype=flat.rows_dtype,
        ).rows

    def _shown(self, stored: Tensor) -> Tensor:
        """Rows or states where they are stored, as a tensor of the device that looks them up."""
        return stored

    def _shown_rows(self, group: TableGroup, part: int, table: Table) -> Tensor:
        """The rows of ``table`` in the weight of its group, or in the state of number ``part - 1``,
        as TorchRec is to see them."""
        stored = (group.stored_weight, *group.stored_states)[part]
        return self._shown(group.table_rows(stored, table))

    def flush(self) -> None:
        """Bring rows and states that TorchRec sees up to date. Waits for a GPU where rows are
        cached on it."""

    def reset_cache_states(self) -> None:
        """Forget which rows are cached on the device, since others are to be loaded."""
