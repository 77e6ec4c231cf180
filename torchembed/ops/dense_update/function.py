"""The public function ``dense_update``, and the rule that it takes."""

import dataclasses
import itertools
from collections.abc import Sequence

from torch import Tensor

from torchembed.core.types import OptimizerKind
from torchembed.core.update_records import DenseUpdate
from torchembed.ops.dense_update.schema import dense_update_op


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseRule:
    """Rule of an update of dense elements: ``w`` by its gradient ``g``, in float32 arithmetic.

    First ``g *= grad_multiplier``, then ``g += weight_decay * w``. Then, as the optimizers of
    ``torch.optim`` of the same name:

    - ``SGD``: ``w -= lr g``.
    - ``ADAGRAD`` (Duchi, Hazan, Singer 2011): ``s += g*g``, ``w -= lr g / (sqrt(s) + eps)``.
    - ``ADAM`` (Kingma, Ba 2015): ``m += (1 - beta1) (g - m)``, ``v += (1 - beta2) (g*g - v)``,
      ``w -= lr / (1 - beta1**step) m / (sqrt(v) / sqrt(1 - beta2**step) + eps)``.

    Raises:
        ValueError: for row-wise Adagrad, since a dense weight has no rows.
    """

    kind: OptimizerKind
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.kind is OptimizerKind.ROWWISE_ADAGRAD:
            raise ValueError(
                "kind must be SGD, ADAGRAD or ADAM, got ROWWISE_ADAGRAD, which is for tables"
            )

    @property
    def num_states(self) -> int:
        """Optimizer-state tensors that the rule needs, each of the weight's shape."""
        return {OptimizerKind.SGD: 0, OptimizerKind.ADAGRAD: 1}.get(self.kind, 2)


def dense_update(
    weight: Tensor,
    states: tuple[Tensor, ...],
    grad: Tensor,
    rule: DenseRule,
    lr: Tensor,
    *,
    rounded: Tensor | None = None,
    step: Tensor | None = None,
    grad_multiplier: Tensor | None = None,
    skip: Tensor | None = None,
    parts: Sequence[slice] | None = None,
) -> None:
    """Update every element of a flat weight, or of some ``parts`` of it, in one pass.

    Changes ``weight``, ``states`` and ``rounded``.

    Deterministic; never synchronizes. Scalars that change between steps are tensors on the device
    of ``weight``.

    Worked example: SGD with lr 2, ``weight = [10]`` and ``grad = [3]`` give ``weight = [4]``.

    Args:
        weight: ``[N]``, float32, contiguous.
        states: float32 ``[N]``, contiguous; ``rule.num_states`` of them.
        grad: ``[N]``, float32, float16 or bfloat16.
        lr: float32, one element.
        rounded: ``[N]``, float16 or bfloat16, contiguous: becomes ``weight`` rounded to nearest,
            ties to even.
        step: float32, one element, counted from 1; needed by Adam.
        grad_multiplier: float32, one element; multiplies every gradient (inverse loss scale).
        skip: float32, one element; nothing changes where it is not zero.
        parts: slices of the weight to update, each with a stop and with a start that is a multiple
            of 8; the whole weight where None.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit.
    """
    if len(states) != rule.num_states:
        raise ValueError(f"states must be {rule.num_states} tensor(s), got {len(states)}")
    parts = [slice(0, weight.numel())] if parts is None else parts
    bounds = [(part.start, part.stop) for part in parts]
    state0, state1 = (*states, None, None)[:2]
    update = DenseUpdate(
        weight=weight,
        state0=state0,
        state1=state1,
        rounded=rounded,
        grad=grad.contiguous(),
        lr=lr,
        step=step,
        grad_multiplier=grad_multiplier,
        skip=skip,
        bounds=list(itertools.chain.from_iterable(bounds)),
        optimizer=int(rule.kind),
        eps=rule.eps,
        beta1=rule.beta1,
        beta2=rule.beta2,
        weight_decay=rule.weight_decay,
    )
    dense_update_op(*update)
