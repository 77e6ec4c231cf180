"""Runs a static step from its first batch on: as it is while it warms up, then captured."""

from torchembed.step.collective_capture import succeeds_on_all_ranks
from torchembed.step.stages import ReadBatch, TrainedBatch
from torchembed.step.static_step import StaticStep

_WARM_UP_STEPS = 3
"""Before the first capture: the first finds out what is prepared ahead, the next two do it once for
each buffer; kernels are compiled and communicators made on the way."""


class GraphRunner:
    """Trains batches that lie in the input buffers of ``step``, and captures it once it is warm."""

    def __init__(self, step: StaticStep) -> None:
        self.step = step
        self._num_steps = 0
        self._prepared: int | None = None
        """The number of the batch that the step before has prepared."""

    @property
    def is_captured(self) -> bool:
        """True if all further steps are replays."""
        return self.step.is_captured(0) and self.step.is_captured(1)

    def make_ready(self, now: ReadBatch) -> bool:
        """Make the step ready for ``now``, which is in its buffer.

        Collective where the step is captured: every rank does it for the same step.

        Returns:
            False where the step cannot be captured; a warning has said why.
        """
        step = self.step
        step.buffers.wait_until_filled(1 - now.buffer)
        # A step that has prepared this batch has waited for it.
        if self._prepared != now.number:
            step.buffers.wait_until_filled(now.buffer)
            step.prepare(now.buffer)
        is_warm = self._num_steps >= _WARM_UP_STEPS
        if not is_warm or not step.can_capture or step.is_captured(now.buffer):
            return True
        return succeeds_on_all_ranks(lambda: step.capture(now.buffer))

    def run(self, now: ReadBatch, following: ReadBatch | None) -> TrainedBatch:
        """Train ``now``, and prepare ``following``, which is in the other buffer."""
        trained = self.step.run(now.buffer)
        self._num_steps += 1
        self._prepared = None if following is None else following.number
        # Held, since its buffer may be filled anew while the copy of this batch is under way.
        return trained.held_until(self.step.done, source=now.data)
