"""Training of batches of fixed hotness: a static step for each layout of batches that recurs."""

import dataclasses
from collections.abc import Sequence

from torchembed.step.batches.input_buffers import InputBuffers
from torchembed.step.engines.static_step import StaticStep
from torchembed.step.engines.step_resources import StepResources
from torchembed.step.forward_backward_update import StepProgram
from torchembed.step.stages import ReadBatch, Reason, TrainedBatch
from torchembed.step.streams import named_range

_MAX_SEEN = 256
"""The most combinations of layouts without a step that are remembered."""


class StaticEngine:
    """Trains batches of fixed hotness, each by the step of its layout, and prepares each while the
    one before is trained where both have one layout.

    On several ranks a step is one of the layouts that the ranks' batches have together: what ranks
    exchange has the shapes of all of them.

    Attributes:
        step: of the last batch; None before the first one.
    """

    def __init__(self, program: StepProgram) -> None:
        self._program = program
        self.step: StaticStep | None = None
        self._steps: dict[tuple[int, ...], StaticStep] = {}
        """Steps by the number of each rank's layout."""
        self._buffers: dict[int, InputBuffers] = {}
        """Input buffers by the number of this rank's layout."""
        self._seen: dict[tuple[int, ...], None] = {}
        """Layouts of the ranks that came once; in order."""
        self._resources: StepResources | None = None

    @property
    def is_stale(self) -> bool:
        return self._resources is not None and self._resources.are_stale

    @property
    def is_captured(self) -> bool:
        if self.step is None:
            return False
        # Of one of several layouts, batches may come in one of the two buffers alone.
        return self.step.is_captured or (len(self._steps) > 1 and self.step.has_replayed)

    def release(self) -> None:
        for step in self._steps.values():
            step.release()
        for buffers in self._buffers.values():
            # Before their memory is used for something else.
            for buffer in (0, 1):
                buffers.wait_until_filled(buffer)
        self._steps.clear()
        self._buffers.clear()
        self._seen.clear()
        self.step = self._resources = None

    def has_place_for(self, batch: ReadBatch) -> bool:
        """True if there is a step for the layouts that the ranks' batches have, or is to be one;
        the same on all ranks. Called once for each batch; waits for the ranks to have read theirs.
        """
        layouts = batch.agree().layouts
        if layouts in self._steps or not self._steps:
            return True
        # One rank has found out before that its layout recurs.
        recurs = len(layouts) == 1 or layouts in self._seen
        if len(self._seen) < _MAX_SEEN:
            self._seen[layouts] = None
        return recurs and len(self._steps) < self._program.max_layouts

    def prefetch(self, batch: ReadBatch) -> None:
        self._buffers_of(batch).fill(batch)

    def _shared(self) -> StepResources:
        if self._resources is None:
            self._resources = StepResources(self._program)
        return self._resources

    def _buffers_of(self, batch: ReadBatch) -> InputBuffers:
        number = batch.kinds.layout
        if number not in self._buffers:
            self._buffers[number] = InputBuffers(
                batch.form,
                self._program.device,
                tracks_fresh=self._program.epochs is not None,
                stream=self._shared().copies,
            )
        return self._buffers[number]

    def has_prepared(self, now: ReadBatch) -> bool:
        step = self._steps.get(now.agree().layouts)
        return step is not None and step.has_prepared(now)

    def run(self, now: ReadBatch, upcoming: Sequence[ReadBatch]) -> TrainedBatch | Reason:
        self.prefetch(now)
        layouts = now.agree().layouts
        step = self._steps.get(layouts)
        if step is None:
            step = self._steps[layouts] = StaticStep(
                self._program,
                now.form,
                resources=self._shared(),
                buffers=self._buffers_of(now),
            )
        self.step = step
        following = next((batch for batch in upcoming[:1] if batch.kinds.static), None)
        if following is not None:
            self.prefetch(following)
            if following.kinds.layout != now.kinds.layout:
                following = None
        failure = step.make_ready(now)
        if failure is not None:
            return failure
        with named_range("torchembed: step"):
            trained = step.run(now, following)
        if now.padded is None:
            return trained
        result = trained.result
        result = result._replace(batch=now.padded.as_given(result.batch))
        return dataclasses.replace(trained, result=result)
