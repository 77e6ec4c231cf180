"""The public function ``rowwise_update``, and the rule that it takes."""

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.types import OptimizerKind
from torchembed.core.update_records import RowUpdate
from torchembed.ops.rowwise_update.schema import rowwise_update_op
from torchembed.ops.segments import Runs


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """Rule of a row update: row ``w`` by its summed gradient ``g``, in float32 arithmetic.

    First ``g *= grad_multiplier``, then ``g`` is clamped to ``[-max_gradient, max_gradient]`` where
    that is positive, then ``g += weight_decay * w``. Then:

    - ``SGD``: ``w -= lr g``.
    - ``ADAGRAD`` (Duchi, Hazan, Singer 2011; as ``torch.optim.Adagrad``): ``s += g*g``,
      ``w -= lr g / (sqrt(s) + eps)``.
    - ``ROWWISE_ADAGRAD``: the same with one ``s`` a row, ``s += mean(g*g)``.
    - ``ADAM`` (Kingma, Ba 2015; as ``torch.optim.SparseAdam``): ``m += (1 - beta1) (g - m)``,
      ``v += (1 - beta2) (g*g - v)``,
      ``w -= lr sqrt(1 - beta2**step) / (1 - beta1**step) m / (sqrt(v) + eps)``.

    Rows that the batch does not touch keep their weights and their state.
    """

    kind: OptimizerKind
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    max_gradient: float = 0.0

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the optimizer-state tensors that the rule needs, those of torch's optimizers."""
        names = {OptimizerKind.SGD: (), OptimizerKind.ADAM: ("exp_avg", "exp_avg_sq")}
        return names.get(self.kind, ("sum",))

    @property
    def num_states(self) -> int:
        """Number of optimizer-state tensors that the rule needs."""
        return len(self.state_names)

    def state_shape(self, num_rows: int, dim: int) -> tuple[int, ...]:
        """Shape of each float32 state tensor of a table of ``num_rows`` by ``dim``."""
        if self.kind is OptimizerKind.ROWWISE_ADAGRAD:
            return (num_rows,)
        return (num_rows, dim)

    def state_bytes(self, num_rows: int, dim: int) -> int:
        """Bytes of all state tensors of a table of ``num_rows`` by ``dim``."""
        return self.num_states * 4 * math.prod(self.state_shape(num_rows, dim))


class RowGradients(NamedTuple):
    """Gradients of a batch's rows, not yet summed over the occurrences of a row.

    The row at position ``p`` of the batch has the gradient ``scales[p] * grad[gradient_rows[p]]``.
    """

    grad: Tensor
    """``[G, D]``, float32, float16 or bfloat16."""
    gradient_rows: Tensor | None = None
    """``[L]``, int32 or int64, into ``grad``; None: position p has gradient row p."""
    scales: Tensor | None = None
    """``[L]``, float32; None: all ones."""


class RoundingKeys(NamedTuple):
    """Keys that make stochastic rounding a function of (seed, table, row, step, column) alone."""

    row_offsets: Tensor
    """int64 ``[T + 1]``: table t holds rows ``[row_offsets[t], row_offsets[t + 1])``."""
    row_keys: Tensor
    """int64 ``[T]``: each table's key, shifted so that a row of the group draws what its row of the
    table draws, see :func:`torchembed.tables.shifted_row_key`."""
    first_columns: Tensor | None = None
    """int64 ``[T]``: the number, in its whole table, of each table's first column here; None: all
    zeros."""


def rowwise_update(
    weight: Tensor,
    states: tuple[Tensor, ...],
    runs: Runs,
    gradients: RowGradients,
    rule: UpdateRule,
    lr: Tensor,
    *,
    step: Tensor | None = None,
    grad_multiplier: Tensor | None = None,
    skip: Tensor | None = None,
    rounding: RoundingKeys | None = None,
) -> None:
    """Sum each run's gradients and update its row, in one pass. Changes ``weight`` and ``states``.

    Deterministic: a run is summed in the order of ``runs.order``. Never synchronizes. Scalars that
    change between steps are tensors on the device of ``weight``.

    Args:
        weight: ``[R, D]``, float32, float16 or bfloat16, contiguous.
        states: float32, of ``rule.state_shape(R, D)``; ``rule.num_states`` of them, contiguous.
        runs: from :func:`~torchembed.ops.segments.find_runs`.
        gradients: one for each position that ``runs`` was made from.
        lr: float32 ``[1]``.
        step: float32 ``[1]``, counted from 1; needed by Adam and by stochastic rounding.
        grad_multiplier: float32 ``[1]``, multiplies every gradient (inverse loss scale, clipping).
        skip: float32 ``[1]``; nothing changes where it is not zero.
        rounding: rounds 16-bit weights stochastically; None rounds to nearest, ties to even.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit.
    """
    if len(states) != rule.num_states:
        raise ValueError(f"states must be {rule.num_states} tensor(s), got {len(states)}")
    if rounding is not None and weight.dtype == torch.float32:
        raise ValueError("rounding must be None for float32 weights, which need no rounding")
    grad, gradient_rows, scales = gradients
    row_offsets, row_keys, first_columns = (None, None, None) if rounding is None else rounding
    update = RowUpdate(
        weight=weight,
        state0=states[0] if states else None,
        state1=states[1] if len(states) > 1 else None,
        unique_rows=runs.unique_rows,
        starts=runs.starts,
        order=runs.order,
        num_runs=runs.num_runs,
        chunk_runs=runs.chunk_runs,
        grad=grad.contiguous(),
        gradient_rows=None if gradient_rows is None else gradient_rows.contiguous(),
        scales=None if scales is None else scales.contiguous(),
        lr=lr,
        step=step,
        grad_multiplier=grad_multiplier,
        skip=skip,
        row_offsets=None if row_offsets is None else row_offsets.contiguous(),
        row_keys=None if row_keys is None else row_keys.contiguous(),
        first_columns=None if first_columns is None else first_columns.contiguous(),
        optimizer=int(rule.kind),
        eps=rule.eps,
        beta1=rule.beta1,
        beta2=rule.beta2,
        weight_decay=rule.weight_decay,
        max_gradient=rule.max_gradient,
    )
    rowwise_update_op(*update)
