"""A train step without a graph, that never waits for a GPU by itself."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from torchembed.core.trees import map_tensors
from torchembed.modules.bad_ids import Suspect, deferred_bad_ids
from torchembed.step.bad_batches import Verdict, either, judge, skip_of
from torchembed.step.loss import ComputeLoss
from torchembed.step.step_optimizers import StepOptimizers, update
from torchembed.step.step_result import StepOutcome, StepResult


def eager_step(
    model: nn.Module,
    compute_loss: ComputeLoss,
    optimizers: StepOptimizers,
    batch: Any,
    group: Any,
    *,
    held: Any,
    known: Verdict | None = None,
    known_suspects: Sequence[Suspect] = (),
) -> StepOutcome:
    """Forward, backward and update, unless ids are bad: on a device that the host is ahead of.

    Args:
        batch: on the device.
        group: the ranks that train together; None for one.
        held: what the device may still read once this has returned.
        known: of ids that were looked at before, ``known_suspects``.
    """
    optimizers.zero_grad()
    with deferred_bad_ids() as suspects:
        loss, output = compute_loss(model, batch)
    verdict = either(known, judge(suspects, group))
    loss.backward()
    update(optimizers.all, skip_of(verdict))
    result = StepResult(loss.detach(), map_tensors(Tensor.detach, output), batch)
    report = None if verdict is None else verdict.to_host()
    return StepOutcome(result, report, [*known_suspects, *suspects], held)
