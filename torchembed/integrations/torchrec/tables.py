"""torchembed's tables behind the part of FBGEMM's interface that TorchRec's kernels use.

``embedding_specs``, ``weights_precision``, ``weights_dev``, ``weights_host``,
``weights_physical_offsets``, ``split_embedding_weights``, ``get_optimizer_state``,
``set_learning_rate`` and the like have FBGEMM's names and signatures.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

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
from torchembed.integrations.torchrec.dynamic_rows import DynamicRows
from torchembed.integrations.torchrec.flat_tables import FlatTables
from torchembed.integrations.torchrec.hyper_parameters import HyperParameters
from torchembed.modules.feature_selection import select_features
from torchembed.ops.linearize_ids import linearize_ids
from torchembed.ops.pooled_lookup import pooled_lookup
from torchembed.ops.row_gradients import GradientSink
from torchembed.ops.rowwise_update import RowGradients, UpdateRule, rowwise_update
from torchembed.ops.segments import find_runs
from torchembed.ops.sequence_lookup import sequence_lookup
from torchembed.tables import MissingVectors, Table, TableGroup

STATE_NAMES = {
    OptimizerKind.SGD: (),
    OptimizerKind.ADAGRAD: ("sum",),
    OptimizerKind.ROWWISE_ADAGRAD: ("sum",),
    OptimizerKind.ADAM: ("exp_avg", "exp_avg_sq"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """Settings of row updates in backward, and of the check of ids, for the tables of a kernel."""

    rule: UpdateRule
    learning_rate: float
    stochastic_rounding: bool
    bounds_check: BoundsCheckMode


class BatchedTables(nn.Module):
    """The tables of one of TorchRec's kernels; each width is looked up in one call.

    Args:
        tables, feature_tables: see :class:`FlatTables`.
        flat: memory of all rows; :class:`FlatTables` says in which order.
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
        pooling: Pooling | None,
        precision: SparseType,
        output_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self._tables = list(tables)
        self._flat = FlatTables(tables, feature_tables, flat.detach())
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
                split[self._tables.index(table)] = group.table_rows(group.weight, table)
        return split

    def _look_up(
        self,
        weights: Sequence[Tensor],
        sink_of: Callable[[TableGroup], GradientSink | None],
        ids: Tensor,
        offsets: Tensor,
        per_id_weights: Tensor | None,
    ) -> Tensor:
        """Look up ``[B, sum of the features' columns]``, or ``[L, D]`` without pooling.

        Args:
            weights: the rows of each group, as autograd is to see them.
            sink_of: for a group, makes what takes the gradients of the rows looked up in it; None
                for ordinary gradients.
        """
        flat = self._flat
        num_features = flat.num_features
        batch_size = (offsets.numel() - 1) // num_features
        rows = self._rows(ids, offsets, batch_size)
        missing: list[MissingVectors | None] = [None] * len(weights)
        if self.dynamic_rows is not None:
            missing = self.dynamic_rows.missing(ids, offsets, batch_size, rows)
        if self._pooling is None:
            (weight,), (group,) = weights, flat.groups
            return self._with_missing(
                functools.partial(sequence_lookup, weight, rows, sink=sink_of(group)),
                sequence_lookup,
                missing[0],
            )
        pool = functools.partial(pooled_lookup, batch_size=batch_size, pooling=self._pooling)
        features = SparseFeatures(
            keys=tuple(map(str, range(num_features))),
            values=rows,
            batch_size=batch_size,
            offsets=offsets,
            weights=per_id_weights,
        )
        columns: list[Tensor] = [rows] * num_features
        for weight, group, numbers, missed in zip(
            weights, flat.groups, flat.features, missing, strict=True
        ):
            is_whole = len(weights) == 1
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
            look_up = functools.partial(of_group, weight, selected.values, sink=sink_of(group))
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
        """What ``look_up`` gives, with the vectors of ids that have no row, by ``look_up_in``."""
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

    def flush(self) -> None:
        """Do nothing, since no row is cached."""

    def reset_cache_states(self) -> None:
        """Do nothing, since no row is cached."""


class FusedTables(BatchedTables):
    """Tables that backward updates, as ``SplitTableBatchedEmbeddingBagsCodegen`` does.

    Backward reads the learning rate as it is then; Adam's step is the number of forwards so far.
    See :class:`BatchedTables` for the other arguments.

    Attributes:
        hyper_parameters: the rule of updates, and their learning rate.
        rounds: whether updated rows are rounded stochastically.
        bounds_check: FBGEMM's mode for ids outside their table.
        counts: whether forwards are counted, as the rule or the rounding requires.
        iteration: the number of forwards so far, 0 where they are not counted.
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
    ) -> None:
        num_elements = sum(table.num_rows * table.num_columns for table in tables)
        flat = torch.empty(num_elements, dtype=precision.as_dtype(), device=device)
        super().__init__(tables, feature_tables, flat, pooling, precision, output_dtype)
        self.hyper_parameters = HyperParameters(
            rule=settings.rule,
            learning_rate=settings.learning_rate,
            learning_rate_tensor=torch.full((1,), settings.learning_rate, device=device),
        )
        self.rounds = settings.stochastic_rounding and flat.dtype != torch.float32
        self.bounds_check = settings.bounds_check
        self._bounds_check_warning = torch.zeros(1, dtype=torch.int64, device=device)
        self.counts = self.rounds or settings.rule.kind is OptimizerKind.ADAM
        self.iteration = 0
        self.weights_dev = self.weights_host = flat
        is_cpu = device.type == "cpu"
        place = EmbeddingLocation.HOST if is_cpu else EmbeddingLocation.DEVICE
        compute = ComputeDevice.CPU if is_cpu else ComputeDevice.CUDA
        self.embedding_specs = [(t.num_rows, t.num_columns, place, compute) for t in tables]
        for group in self.groups:
            group.set_rule(settings.rule, 0.0)
        # Autograd runs the lookup's backward only for a tensor that requires a gradient; the sink
        # takes the gradients, and the tensor itself gets none.
        self._differentiable = [group.weight.detach().requires_grad_() for group in self.groups]

    def forward(self, ids: Tensor, offsets: Tensor, per_id_weights: Tensor | None = None) -> Tensor:
        if self.bounds_check is not BoundsCheckMode.NONE and self.dynamic_rows is None:
            # The check requires one dtype of both; torchembed's operations take any two.
            offsets = offsets.to(ids.dtype)
            torch.ops.fbgemm.bounds_check_indices(
                self._flat.num_rows,
                ids,
                offsets,
                self.bounds_check.value,
                self._bounds_check_warning,
                per_id_weights,
            )
        if self.counts:
            self.iteration += 1
        return self._look_up(self._differentiable, self._sink_of, ids, offsets, per_id_weights)

    def _sink_of(self, group: TableGroup) -> GradientSink:
        """Make the sink that updates ``group`` as of this forward."""
        return functools.partial(self._update, group, self.iteration)

    def _update(
        self, group: TableGroup, iteration: int, rows: Tensor, gradients: RowGradients
    ) -> None:
        rule, step = self.hyper_parameters.rule, None
        if rule.kind is OptimizerKind.ADAM:
            # FBGEMM adds eps to the bias-corrected root, rowwise_update to the uncorrected one.
            rule = dataclasses.replace(rule, eps=rule.eps * math.sqrt(1 - rule.beta2**iteration))
        if self.counts:
            step = group.step.fill_(iteration)
        rowwise_update(
            group.weight,
            group.states,
            find_runs(rows, group.num_rows),
            gradients,
            rule,
            self.hyper_parameters.learning_rate_tensor,
            step=step,
            rounding=group.rounding_keys if self.rounds else None,
        )
        group.index.release_forwards()

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        """Views of each table's states by torch's names; empty where the rule has none."""
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
        """Views of each table's states, in the order of :meth:`get_optimizer_state`."""
        return [list(states.values()) for states in self.get_optimizer_state()]

    def get_learning_rate(self) -> float:
        return self.hyper_parameters.learning_rate

    def set_learning_rate(self, lr: float) -> None:
        self.hyper_parameters.set_learning_rate(lr)

    def set_optimizer_step(self, step: int) -> None:
        """Set the number of forwards so far to ``step``."""
        self.iteration = step

    def update_hyper_parameters(self, params_dict: Mapping[str, float]) -> None:
        """Set any of ``lr``, ``eps``, ``beta1``, ``beta2`` and ``weight_decay``.

        Raises:
            NotImplementedError: for any other name.
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
