"""Our tables where TorchRec's kernels hold FBGEMM's: the part of its interface that TorchRec uses.

``embedding_specs``, ``weights_precision``, ``weights_dev``, ``weights_host``,
``weights_physical_offsets``, ``split_embedding_weights``, ``get_optimizer_state``,
``set_learning_rate`` and their like are FBGEMM's names and forms.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice
from torch import Tensor, nn

from torchembed.core.features import SparseFeatures
from torchembed.core.types import OnBadId, OptimizerKind, Pooling
from torchembed.integrations.torchrec.layout import Layout
from torchembed.integrations.torchrec.shared_rows import HyperParameters, Rows
from torchembed.modules.slots import select_features
from torchembed.ops.linearize_ids import linearize_ids
from torchembed.ops.pooled_lookup import pooled_lookup
from torchembed.ops.row_gradients import GradientSink
from torchembed.ops.rowwise_update import RowGradients, UpdateRule, rowwise_update
from torchembed.ops.segments import Runs, find_runs
from torchembed.ops.sequence_lookup import sequence_lookup
from torchembed.tables import Table, TableGroup

STATE_NAMES = {
    OptimizerKind.SGD: (),
    OptimizerKind.ADAGRAD: ("sum",),
    OptimizerKind.ROWWISE_ADAGRAD: ("sum",),
    OptimizerKind.ADAM: ("exp_avg", "exp_avg_sq"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """How the rows of some tables change in backward, and how their ids are checked."""

    rule: UpdateRule
    learning_rate: float
    stochastic_rounding: bool
    bounds_check: BoundsCheckMode


class BatchedTables(nn.Module):
    """The tables of one of TorchRec's kernels, looked up in one call for each width.

    Args:
        tables, feature_tables: see :class:`Layout`.
        flat: all rows, in the order of the layout.
        pooling: None for a vector for each id.
        precision: of the rows, as FBGEMM names it.
        output_dtype: of the vectors.

    Attributes:
        groups: the tables of each width.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        feature_tables: Sequence[int],
        flat: Tensor,
        pooling: Pooling | None,
        precision: SparseType,
        output_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self._tables = list(tables)
        self._layout = Layout(tables, feature_tables, flat.detach())
        self.groups = self._layout.groups
        self._pooling = pooling
        self._output_dtype = output_dtype
        self.weights_precision = precision
        self.weights_physical_offsets = self._layout.offsets

    def split_embedding_weights(self) -> list[Tensor]:
        """The rows of each table, ``[num_rows, num_columns]``, views."""
        split: list[Tensor] = [torch.empty(0)] * len(self._tables)
        for group in self.groups:
            for table in group.tables:
                split[self._tables.index(table)] = group.table_rows(group.weight, table)
        return split

    def _look_up(
        self,
        weights: Sequence[Tensor],
        sink_of: Callable[[TableGroup, Tensor], GradientSink | None],
        ids: Tensor,
        offsets: Tensor,
        per_id_weights: Tensor | None,
    ) -> Tensor:
        """``[B, sum of the features' columns]``, or ``[L, D]`` without pooling."""
        layout = self._layout
        num_features = layout.num_features
        batch_size = (offsets.numel() - 1) // num_features
        rows, _ = linearize_ids(
            ids,
            layout.first_rows,
            layout.num_rows,
            offsets=offsets,
            batch_size=batch_size,
            on_bad_id=OnBadId.ZERO,
            rows_dtype=layout.rows_dtype,
        )
        if self._pooling is None:
            (weight,), (group,) = weights, layout.groups
            sink = sink_of(group, rows)
            return sequence_lookup(weight, rows, output_dtype=self._output_dtype, sink=sink)
        pool = functools.partial(
            pooled_lookup,
            batch_size=batch_size,
            pooling=self._pooling,
            output_dtype=self._output_dtype,
        )
        if len(weights) == 1:
            pooled = pool(
                weights[0],
                rows,
                offsets=offsets,
                num_features=num_features,
                per_id_weights=per_id_weights,
                sink=sink_of(layout.groups[0], rows),
            )
            return pooled.flatten(1)
        features = SparseFeatures(
            keys=tuple(map(str, range(num_features))),
            values=rows,
            batch_size=batch_size,
            offsets=offsets,
            weights=per_id_weights,
        )
        columns: list[Tensor] = [rows] * num_features
        for weight, group, numbers in zip(weights, layout.groups, layout.features, strict=True):
            selected = select_features(features, numbers)
            pooled = pool(
                weight,
                selected.values,
                offsets=selected.offsets,
                num_features=len(numbers),
                per_id_weights=selected.weights,
                sink=sink_of(group, selected.values),
            )
            for position, feature in enumerate(numbers):
                columns[feature] = pooled[:, position]
        return torch.cat(columns, dim=1)

    def flush(self) -> None:
        """Nothing is cached."""

    def reset_cache_states(self) -> None:
        """Nothing is cached."""


class FusedTables(BatchedTables):
    """Tables that backward updates, as ``SplitTableBatchedEmbeddingBagsCodegen`` does.

    The learning rate is that of the moment of backward; Adam counts forwards. See
    :class:`BatchedTables` for the other arguments.

    Args:
        memory: what the tables, of one width, are kept in; None for memory of their own.

    Attributes:
        hyper_parameters: the rule of updates, and their learning rate.
        rounds: whether rows are rounded stochastically.
        bounds_check: what becomes of bad ids.
        counts: whether forwards are counted, which the rule or the rounding needs.
        iteration: how many there were.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        feature_tables: Sequence[int],
        pooling: Pooling | None,
        precision: SparseType,
        output_dtype: torch.dtype,
        device: torch.device,
        settings: UpdateSettings,
        memory: Rows | None = None,
    ) -> None:
        if memory is None:
            num_elements = sum(table.num_rows * table.num_columns for table in tables)
            flat = torch.empty(num_elements, dtype=precision.as_dtype(), device=device)
        else:
            flat = memory.weight.view(-1)
        super().__init__(tables, feature_tables, flat, pooling, precision, output_dtype)
        learning_rate = torch.full((1,), settings.learning_rate, device=device)
        self.hyper_parameters = HyperParameters(
            settings.rule, settings.learning_rate, learning_rate
        )
        self.rounds = settings.stochastic_rounding and flat.dtype != torch.float32
        self.bounds_check = settings.bounds_check
        self._bounds_check_warning = torch.zeros(1, dtype=torch.int64, device=device)
        self.counts = self.rounds or settings.rule.kind is OptimizerKind.ADAM
        self.iteration = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        """Where runs of equal rows are found. What they are found in is used up before the next
        forward waits for this stream, so their memory is not taken while it is read."""
        self.weights_dev = self.weights_host = flat
        is_cpu = device.type == "cpu"
        place = EmbeddingLocation.HOST if is_cpu else EmbeddingLocation.DEVICE
        compute = ComputeDevice.CPU if is_cpu else ComputeDevice.CUDA
        self.embedding_specs = [(t.num_rows, t.num_columns, place, compute) for t in tables]
        for group in self.groups:
            if memory is None:
                group.set_rule(settings.rule, 0.0)
            else:
                group.rule, group.states = settings.rule, memory.states
        # Autograd calls the lookup's backward for what requires a gradient; the sink then takes it.
        self._leaves = [group.weight.detach().requires_grad_() for group in self.groups]

    def forward(self, ids: Tensor, offsets: Tensor, per_id_weights: Tensor | None = None) -> Tensor:
        if self.bounds_check is not BoundsCheckMode.NONE:
            torch.ops.fbgemm.bounds_check_indices(
                self._layout.num_rows,
                ids,
                offsets,
                self.bounds_check.value,
                self._bounds_check_warning,
                per_id_weights,
            )
        if self.counts:
            self.iteration += 1
        return self._look_up(self._leaves, self._sink_of, ids, offsets, per_id_weights)

    def part(self, number: int, count: int) -> Rows:
        """The memory of ``count`` tables from ``number`` on, where all are of one width."""
        (group,) = self.groups
        rows = slice(group.first_rows[number], group.first_rows[number + count])
        return Rows(group.weight[rows], tuple(state[rows] for state in group.states))

    def _sink_of(self, group: TableGroup, rows: Tensor) -> GradientSink:
        """Updates the group by the gradients of ``rows``, whose runs are found meanwhile."""
        runs = None
        if self._stream is not None and torch.is_grad_enabled():
            self._stream.wait_stream(torch.cuda.current_stream(rows.device))
            rows.record_stream(self._stream)
            with torch.cuda.stream(self._stream):
                runs = find_runs(rows, group.num_rows)
        return functools.partial(self._update, group, self.iteration, runs)

    def _update(
        self,
        group: TableGroup,
        iteration: int,
        runs: Runs | None,
        rows: Tensor,
        gradients: RowGradients,
    ) -> None:
        if runs is None:
            runs = find_runs(rows, group.num_rows)
        else:
            assert self._stream is not None
            torch.cuda.current_stream(rows.device).wait_stream(self._stream)
        rule, step = self.hyper_parameters.rule, None
        if rule.kind is OptimizerKind.ADAM:
            # FBGEMM adds eps to the corrected root, ours to the uncorrected one.
            rule = dataclasses.replace(rule, eps=rule.eps * math.sqrt(1 - rule.beta2**iteration))
        if self.counts:
            step = group.step.fill_(iteration)
        rowwise_update(
            group.weight,
            group.states,
            runs,
            gradients,
            rule,
            self.hyper_parameters.learning_rate_tensor,
            step=step,
            rounding=group.rounding_keys if self.rounds else None,
        )

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        """The state of each table by torch's names, views; empty where there is none."""
        names = STATE_NAMES[self.hyper_parameters.rule.kind]
        if not names:
            return []
        by_table: list[dict[str, Tensor]] = [{} for _ in self._tables]
        for group in self.groups:
            for table in group.tables:
                states = (group.table_rows(state, table) for state in group.states)
                by_table[self._tables.index(table)] = dict(zip(names, states, strict=True))
        return by_table

    def split_optimizer_states(self) -> list[list[Tensor]]:
        """As :meth:`get_optimizer_state`, without names."""
        return [list(states.values()) for states in self.get_optimizer_state()]

    def get_learning_rate(self) -> float:
        return self.hyper_parameters.learning_rate

    def set_learning_rate(self, lr: float) -> None:
        self.hyper_parameters.set_learning_rate(lr)

    def set_optimizer_step(self, step: int) -> None:
        """Count forwards from ``step`` on."""
        self.iteration = step

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Set ``lr``, ``eps``, ``beta1``, ``beta2`` or ``weight_decay``.

        Raises:
            NotImplementedError: for any other.
        """
        for name, value in params_dict.items():
            if name == "lr":
                self.set_learning_rate(value)
            elif name in ("eps", "beta1", "beta2", "weight_decay"):
                now = self.hyper_parameters
                now.rule = dataclasses.replace(now.rule, **{name: value})
            else:
                raise NotImplementedError(
                    f"params_dict may hold lr, eps, beta1, beta2 and weight_decay, got {name}"
                )


class DenseTables(BatchedTables):
    """Tables with an ordinary gradient, as ``DenseTableBatchedEmbeddingBagsCodegen`` has them: the
    parameter ``weights [elements]`` holds them all. See :class:`BatchedTables` for arguments.
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
        # Drawn as FBGEMM draws it, so that what is drawn afterwards is the same.
        flat = torch.randn(num_elements, dtype=precision.as_dtype(), device=device)
        super().__init__(tables, feature_tables, flat, pooling, precision, output_dtype)
        self.weights = nn.Parameter(flat)
        self.embedding_specs = [(table.num_rows, table.num_columns) for table in tables]

    def forward(self, ids: Tensor, offsets: Tensor, per_id_weights: Tensor | None = None) -> Tensor:
        parts = [
            self.weights[begin:end].view(-1, group.weight.shape[1])
            for (begin, end), group in zip(self._layout.spans, self.groups, strict=True)
        ]
        return self._look_up(parts, lambda *_: None, ids, offsets, per_id_weights)
