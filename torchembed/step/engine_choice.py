"""The choice of an engine for a batch: the first that can train every rank's batch."""

from collections.abc import Callable, Iterator, Sequence

from torchembed.core import ranks
from torchembed.step.eager_engine import EagerEngine
from torchembed.step.engine import StepEngine
from torchembed.step.forward_backward_update import StepProgram
from torchembed.step.jagged_engine import JaggedEngine
from torchembed.step.padded_engine import PaddedEngine
from torchembed.step.stages import NO_KIND, BatchKinds, ReadBatch, TrainedBatch
from torchembed.step.static_engine import StaticEngine


class EngineChoice:
    """The engines of a pipeline.

    Batches of fixed hotness are trained by static steps, jagged ones by padded steps where the
    model allows it and else by jagged ones, all others eagerly.

    Args:
        program: what every step does.
        captures: False for eager steps only.
        wait_for_steps: waits until the device has done all steps so far.

    Attributes:
        last: the engine of the last step.
    """

    def __init__(
        self, program: StepProgram, *, captures: bool, wait_for_steps: Callable[[], None]
    ) -> None:
        self._program, self._wait_for_steps = program, wait_for_steps
        self.captures = captures
        self._eager = EagerEngine(program)
        self._static = StaticEngine(program)
        self._jagged: JaggedEngine | None = None
        """Made for the first jagged batch."""
        self._padded: PaddedEngine | None = None
        self._can_be_padded = True
        """False once padded steps have failed."""
        self.last: StepEngine = self._eager

    @property
    def is_stale(self) -> bool:
        """True if the model has changed in a way that prepared or captured steps do not follow."""
        return any(engine.is_stale for engine in self.engines)

    @property
    def engines(self) -> tuple[StepEngine, ...]:
        """The engine of fixed hotness, and that of jagged batches once there was one."""
        # Padded steps know more of the model than the first jagged one.
        of_jagged = self._jagged if self._padded is None else self._padded
        return (self._static,) if of_jagged is None else (self._static, of_jagged)

    def release(self) -> None:
        """Destroy graphs, and end threads; further steps are first ones."""
        if self._padded is not None:
            self._padded.release()
            self._padded = None
        self._static.release()
        if self._jagged is not None:
            self._jagged.release()

    def prefetch(self, batch: ReadBatch) -> None:
        """Show a batch that was read to the engine that is going to train it."""
        if self.captures:
            engine = next(self._candidates(batch.kinds), None)
            if engine is not None:
                engine.prefetch(batch)

    def run(self, now: ReadBatch, upcoming: Sequence[ReadBatch]) -> TrainedBatch:
        """Train ``now``, and prepare the first of those that are ``upcoming``."""
        # By what all ranks have read: engines differ in their collectives, so every rank must take
        # the same one.
        kinds = now.agree().kinds if self.captures else NO_KIND
        for engine in self._candidates(kinds):
            trained = engine.run(now, upcoming)
            if trained is not None:
                self.last = engine
                break
            self._give_up(engine)
        else:
            self.last, trained = self._eager, self._eager.run(now)
        if self._jagged is not None and self.last is self._jagged:
            if self._padded is None and self._can_be_padded:
                self._try_padding(self._jagged)
            # The first jagged step was needed to know what of further batches can be done ahead.
            for batch in upcoming:
                self.prefetch(batch)
        return trained

    def _candidates(self, kinds: BatchKinds) -> Iterator[StepEngine]:
        if kinds.static:
            yield self._static
        elif kinds.jagged:
            if self._padded is not None:
                yield self._padded
            if self._jagged is None:
                self._jagged = JaggedEngine(self._program)
            yield self._jagged

    def _give_up(self, engine: StepEngine) -> None:
        """Train without ``engine`` from now on; every rank does so at the same step."""
        # Graphs may be destroyed only once no replay of them runs.
        self._wait_for_steps()
        if engine is self._static:
            self.captures = False
            self.release()
        else:
            self._can_be_padded, self._padded = False, None
            engine.release()

    def _try_padding(self, jagged: JaggedEngine) -> None:
        """After the first jagged step, which has shown how the model looks ids up."""
        self._can_be_padded = not ranks.any_rank(not jagged.can_be_padded)
        if self._can_be_padded:
            self._padded = PaddedEngine(self._program, jagged, self._wait_for_steps)
