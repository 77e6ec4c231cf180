"""Tables of TorchRec's kernels that backward updates."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice
from torch import Tensor

from torchembed.core.types import OptimizerKind, Pooling
from torchembed.integrations.torchrec.tables.batched_tables import BatchedTables, LookupSource
from torchembed.integrations.torchrec.tables.hyper_parameters import HyperParameters
from torchembed.ops.rowwise_update import RowGradients, UpdateRule, rowwise_update
from torchembed.ops.segments import Runs, find_runs
from torchembed.tables import Table, TableGroup

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

    _location_on_gpus = EmbeddingLocation.DEVICE

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
        flat = self._allocated(num_elements, precision.as_dtype(), device)
        super().__init__(tables, feature_tables, flat, device, pooling, precision, output_dtype)
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
        self.weights_dev = self.weights_host = self.weights_uvm = self._shown(flat)
        is_cpu = device.type == "cpu"
        place = EmbeddingLocation.HOST if is_cpu else self._location_on_gpus
        compute = ComputeDevice.CPU if is_cpu else ComputeDevice.CUDA
        self.embedding_specs = [(t.num_rows, t.num_columns, place, compute) for t in tables]
        for group in self.groups:
            group.set_rule(settings.rule, 0.0)
        # Autograd runs the lookup's backward only for a tensor that requires a gradient; the sink
        # takes the gradients, and the tensor itself gets none.
        self._differentiable = [group.weight.detach().requires_grad_() for group in self.groups]

    @staticmethod
    def _allocated(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialized memory of all rows."""
        return torch.empty(num_elements, dtype=dtype, device=device)

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
        return self._look_up(ids, offsets, per_id_weights)

    def _source(self, number: int, rows: Tensor) -> LookupSource:
        group = self.groups[number]

        def update(iteration: int, rows: Tensor, gradients: RowGradients) -> None:
            self._update(group, iteration, find_runs(rows, group.num_rows), gradients)

        sink = functools.partial(update, self.iteration)
        return LookupSource(self._differentiable[number], rows, sink)

    def _update(
        self, group: TableGroup, iteration: int, runs: Runs, gradients: RowGradients
    ) -> None:
        """Update the rows of ``group`` in ``weight`` that ``runs`` are of, as of the forward that
        was the ``iteration``-th."""
        rule, step = self.hyper_parameters.rule, None
        if rule.kind is OptimizerKind.ADAM:
            # FBGEMM adds eps to the bias-corrected root, rowwise_update to the uncorrected one.
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
        group.release_forwards()

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        """Views of each table's states by torch's names; empty where the rule has none."""
        names = STATE_NAMES[self.hyper_parameters.rule.kind]
        if not names:
            return []
        by_table: list[dict[str, Tensor]] = [{} for _ in self._tables]
        for group in self.groups:
            for table in group.tables:
                states = [
                    self._shown_rows(group, part + 1, table)
                    for part in range(len(group.stored_states))
                ]
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
