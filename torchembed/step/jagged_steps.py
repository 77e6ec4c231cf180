"""Steps on batches whose lengths vary: captured where the model allows it, else as they are."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from torchembed.core import ranks
from torchembed.step.collection_calls import CollectionCall
from torchembed.step.jagged_step import JaggedStep
from torchembed.step.loss import ComputeLoss
from torchembed.step.padded_steps import PaddedSteps
from torchembed.step.read_ahead import Upcoming
from torchembed.step.sorted_ids import Room
from torchembed.step.static_step import StaticStep
from torchembed.step.step_result import StepOutcome


class JaggedSteps:
    """Takes the first step as it is, which shows how the model looks ids up, and further ones in
    padded steps where they can be.

    Args:
        make_static: as :class:`PaddedSteps` needs it.
        wait_for_steps: waits until the device has done all steps so far.
        group: the ranks that train together; None for one.
    """

    def __init__(
        self,
        model: nn.Module,
        compute_loss: ComputeLoss,
        optimizers: Sequence[torch.optim.Optimizer],
        make_static: Callable[[Any, Sequence[CollectionCall], Room], StaticStep],
        wait_for_steps: Callable[[], None],
        *,
        device: torch.device,
        group: Any,
    ) -> None:
        self._model, self._compute_loss, self._optimizers = model, compute_loss, optimizers
        self._make_static, self._wait_for_steps = make_static, wait_for_steps
        self._device, self._group = device, group
        self._plain: JaggedStep | None = None
        self._padded: PaddedSteps | None = None
        self._pads = True
        """False once padded steps have failed."""

    @property
    def is_stale(self) -> bool:
        """Whether what steps take for granted has changed."""
        steps = self._plain if self._padded is None else self._padded
        return steps is not None and steps.is_stale

    @property
    def is_captured(self) -> bool:
        """Whether steps are graphs."""
        return self._padded is not None and self._padded.is_captured

    def release(self) -> None:
        """Destroy the graphs, and end the thread; a further step is a first one."""
        if self._plain is not None:
            self._plain.release()
        if self._padded is not None:
            self._padded.release()
        self._plain = self._padded = None

    def announce(self, upcoming: Upcoming) -> None:
        """Have the sizes found out of a batch that was read, where that was not begun before."""
        if self._padded is not None:
            if upcoming.needs is None:
                self._padded.announce(upcoming)
        elif self._plain is not None and upcoming.jagged is None:
            upcoming.jagged = self._plain.announce(upcoming.batch, upcoming.is_jagged)

    def run(self, now: Upcoming, upcoming: Sequence[Upcoming]) -> StepOutcome:
        """Train ``now``, and prepare the first of those that are ``upcoming``."""
        if self._padded is not None:
            outcome = self._padded_step(self._padded, now, upcoming)
            if outcome is not None:
                return outcome
        if self._plain is None:
            return self._first_step(now.batch)
        for announced in (now, *upcoming):
            self.announce(announced)
        assert now.jagged is not None
        following = next((u.jagged for u in upcoming[:1] if u.is_jagged()), None)
        return self._plain.run(now.jagged, following)

    def _first_step(self, batch: Any) -> StepOutcome:
        plain = JaggedStep(
            self._model, self._compute_loss, self._optimizers, self._device, self._group
        )
        outcome = plain.observe(batch)
        # Only now: one that failed before has not seen all calls.
        self._plain = plain
        if self._pads and not ranks.any_rank(not plain.can_be_padded):
            self._padded = PaddedSteps(self._make_static, plain, self._device)
        return outcome

    def _padded_step(
        self, padded: PaddedSteps, now: Upcoming, upcoming: Sequence[Upcoming]
    ) -> StepOutcome | None:
        """None where there are none any more."""
        if not padded.has_room_for(now):
            self._wait_for_steps()
            padded.make_room(now, upcoming)
        outcome = padded.run(now, upcoming[0] if upcoming else None)
        if outcome is None:
            self._pads, self._padded = False, None
            self._wait_for_steps()
            padded.release()
        return outcome
