"""A static step from its first batch on: as it is at first, and then as CUDA graphs."""

from torchembed.step.capturing import captured_on_all_ranks
from torchembed.step.read_ahead import Upcoming
from torchembed.step.static_step import StaticStep
from torchembed.step.step_result import StepOutcome

_WARM_UP_STEPS = 3
"""Before the first capture: the first finds out what is prepared ahead, the next two do it once for
each turn; kernels are compiled and communicators made on the way."""


class CapturedSteps:
    """Takes the turns of a static step, and captures each once steps have warmed up."""

    def __init__(self, step: StaticStep) -> None:
        self.step = step
        self._num_steps = 0
        self._prepared: int | None = None
        """The batch that the step before has prepared."""

    @property
    def is_captured(self) -> bool:
        """Whether all further steps are graphs."""
        return self.step.is_captured(0) and self.step.is_captured(1)

    @property
    def is_stale(self) -> bool:
        """Whether what its steps take for granted has changed."""
        return self.step.is_stale

    def release(self) -> None:
        """Destroy the graphs."""
        self.step.release()

    def make_ready(self, now: Upcoming) -> bool:
        """Make the step ready for ``now``, which is in its slot; False where it cannot be captured.

        Collective where it is captured: every rank does it for the same step.
        """
        step = self.step
        step.slots.wait_until_filled(1 - now.turn)
        # A step that has prepared this batch has waited for it.
        if self._prepared != now.number:
            step.slots.wait_until_filled(now.turn)
            step.prepare(now.turn)
        is_warm = self._num_steps >= _WARM_UP_STEPS
        if not is_warm or not step.can_capture or step.is_captured(now.turn):
            return True
        return captured_on_all_ranks(lambda: step.capture(now.turn), "the train step")

    def run(self, now: Upcoming, following: Upcoming | None) -> StepOutcome:
        """Train ``now``, and prepare ``following``, which is in the other slot."""
        result = self.step.run(now.turn)
        self._num_steps += 1
        self._prepared = None if following is None else following.number
        report, suspects = self.step.verdict(now.turn)
        # Held, since its slot may be filled anew while the copy of this batch is under way.
        return StepOutcome(result, report, suspects, held=now.batch, done=self.step.done)
