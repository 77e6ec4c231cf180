"""Captured steps on batches of fixed hotness."""

from collections.abc import Sequence

from torchembed.core.named_range import named_range
from torchembed.step.forward_backward_update import StepProgram
from torchembed.step.graph_runner import GraphRunner
from torchembed.step.stages import ReadBatch, TrainedBatch
from torchembed.step.static_step import StaticStep


class StaticEngine:
    """Trains batches of one layout, and prepares each while the one before is trained."""

    def __init__(self, program: StepProgram) -> None:
        self._program = program
        self._runner: GraphRunner | None = None
        self._copied: set[int] = set()
        """The numbers of the batches whose copy to their buffer was begun."""

    @property
    def is_stale(self) -> bool:
        return self._runner is not None and self._runner.step.is_stale

    @property
    def is_captured(self) -> bool:
        return self._runner is not None and self._runner.is_captured

    @property
    def step(self) -> StaticStep | None:
        """The step that is repeated; None before the first batch."""
        return None if self._runner is None else self._runner.step

    def release(self) -> None:
        if self._runner is not None:
            self._runner.step.release()
            self._runner = None
        self._copied.clear()

    def prefetch(self, batch: ReadBatch) -> None:
        self._copy(self._runner_for(batch), batch)

    def _runner_for(self, batch: ReadBatch) -> GraphRunner:
        if self._runner is None:
            self._runner = GraphRunner(StaticStep(self._program, batch.data))
        return self._runner

    def _copy(self, runner: GraphRunner, batch: ReadBatch) -> None:
        if batch.number not in self._copied:
            runner.step.buffers.fill(batch.buffer, batch.data)
            self._copied.add(batch.number)

    def run(self, now: ReadBatch, upcoming: Sequence[ReadBatch]) -> TrainedBatch | None:
        runner = self._runner_for(now)
        following = next((batch for batch in upcoming[:1] if batch.kinds.static), None)
        for batch in (now, following):
            if batch is not None:
                self._copy(runner, batch)
        if not runner.make_ready(now):
            return None
        self._copied = {number for number in self._copied if number > now.number}
        with named_range("torchembed: step"):
            return runner.run(now, following)
