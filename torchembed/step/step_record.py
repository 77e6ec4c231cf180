"""The kinds of a pipeline's steps: counted, and logged where they change."""

import logging

from torchembed.step.stages import Reason, StepKind

_logger = logging.getLogger("torchembed.step")


class StepRecord:
    """Counts steps by their kind, and captures.

    Attributes:
        kinds: number of steps of each kind, in the order in which kinds came first.
        num_steps: number of steps so far.
        num_captures: number of steps that were captured; a step is captured once for each of two
            input buffers.
    """

    def __init__(self) -> None:
        self.kinds: dict[StepKind, int] = {}
        self.num_captures = 0
        self._last: StepKind | None = None
        self.num_steps = 0

    def note_change(self, changed: Reason) -> None:
        """One line of the log for a value that has ``changed``, so that steps are captured anew."""
        _logger.info("before step %d: %s; they are captured anew", self.num_steps + 1, changed)

    def note_step(self, kind: StepKind) -> None:
        """Count a step; one line of the log where its kind is not that of the step before."""
        self.num_steps += 1
        # Most steps have the very object of the step before.
        if kind is not self._last and kind != self._last:
            before = "" if self._last is None else f", no longer {self._last.form}"
            _logger.info("from step %d on: %s%s", self.num_steps, kind, before)
        self._last = kind
        self.kinds[kind] = self.kinds.get(kind, 0) + 1

    def note_capture(self) -> None:
        """Count a capture."""
        self.num_captures += 1
