"""The choice of an engine for a batch: the first that can train every rank's batch."""

import warnings
from collections.abc import Callable, Iterator, Sequence

from torchembed.core import ranks
from torchembed.step.engines.eager_engine import EagerEngine
from torchembed.step.engines.engine import StepEngine
from torchembed.step.engines.jagged_engine import JaggedEngine
from torchembed.step.engines.padded_engine import PaddedEngine
from torchembed.step.engines.static_engine import StaticEngine
from torchembed.step.forward_backward_update import StepProgram
from torchembed.step.stages import (
    NO_KIND,
    BatchKinds,
    ReadBatch,
    Reason,
    StepForm,
    StepKind,
    TrainedBatch,
)
from torchembed.step.watches.hooks import PythonHooks
from torchembed.step.watches.model_changes import ModelChanges
from torchembed.step.watches.padding_check import PaddingCheck

_GRAPH, _PADDED = StepKind(StepForm.GRAPH), StepKind(StepForm.PADDED)
_WARMS_UP = StepKind(StepForm.EAGER, Reason("the first steps before a capture warm up"))
_OTHER_RANK = Reason("another rank's batch is of another kind")
_OTHER_LAYOUTS = Reason(
    "the ranks' batches have other layouts together than in captured steps; as many captured steps "
    "as max_layouts says are for layouts that came together twice"
)
_FIRST_JAGGED = Reason("the first jagged step shows which ids the model looks up")
_NOT_PADDED = Reason("the model looks ids up that are no features of the batch as they came")


class EngineChoice:
    """The engines of a pipeline.

    Batches of fixed hotness are trained by static steps, jagged ones by padded steps where the
    model allows it and else by jagged ones, all others eagerly.

    Args:
        program: what every step does.
        not_captured: the reason why all steps are eager; None where steps are captured.
        wait_for_steps: waits until the device has done all steps so far.

    While a hook is there that no graph can call, all batches are trained eagerly.

    Attributes:
        not_captured: as given, or found since.
        last: the engine of the last step.
        last_kind: the kind of the last step.
        hooks: those that are there.
        values: what captured steps hold of the model and the optimizers.
    """

    def __init__(
        self,
        program: StepProgram,
        *,
        not_captured: Reason | None,
        wait_for_steps: Callable[[], None],
    ) -> None:
        self._program, self._wait_for_steps = program, wait_for_steps
        self.not_captured = not_captured
        self.values = program.values
        self._padding = PaddingCheck(program)
        self._changes = ModelChanges(program.trained)
        self.hooks = PythonHooks(program.model, program.optimizers, self.values, program.loss_fn)
        self._eager = EagerEngine(program, checks_at_once=True)
        self._static = StaticEngine(program)
        self._jagged: JaggedEngine | None = None
        """Made for the first jagged batch."""
        self._padded: PaddedEngine | None = None
        self._not_padded: Reason | None = None
        """Why jagged steps cannot be padded ones, once that is known."""
        self.last: StepEngine = self._eager
        self.last_kind = StepKind(StepForm.EAGER, not_captured)

    @property
    def captures(self) -> bool:
        """True where steps are captured if they can be."""
        return self.not_captured is None

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
        self.values.held = None
        if self._padded is not None:
            self._padded.release()
            self._padded = None
        self._static.release()
        self._eager.release()
        if self._jagged is not None:
            self._jagged.release()

    def note_stale(self) -> Reason | None:
        """Note that steps begin anew since the model has changed.

        Returns:
            The reason to capture no more, where this recurs.
        """
        return self._changes.note(self._program.record.num_steps) if self.captures else None

    def capture_no_more(self, why: Reason) -> None:
        """Train eagerly from now on, as a warning says; on all ranks before the same step."""
        self.not_captured = why
        warnings.warn(
            "the train step is not captured as a CUDA graph any more, so it runs eagerly from now "
            f"on: {why}",
            stacklevel=4,  # whoever called the pipeline
        )

    def prefetch(self, batch: ReadBatch) -> None:
        """Show a batch that was read to the engine that is going to train it."""
        if self.captures:
            engine = next(self._candidates(batch.kinds), None)
            if engine is not None:
                engine.prefetch(batch)

    def has_prepared(self, now: ReadBatch) -> bool:
        """True if the step before has prepared ``now``, so that tables have admitted its ids; the
        same on all ranks."""
        if not self.captures:
            return False
        engine = next(self._candidates(now.agree().kinds), None)
        return engine is not None and engine.has_prepared(now)

    def run(self, now: ReadBatch, upcoming: Sequence[ReadBatch]) -> TrainedBatch:
        """Train ``now``, and prepare the first of those that are ``upcoming``; where there are
        none, nothing is prepared."""
        if not self.captures:
            return self._run_eagerly(now)
        # By what all ranks have read: engines differ in their collectives, so every rank must take
        # the same one.
        kinds = now.agree().kinds
        if self.hooks.are_there:
            kinds = self._kinds_with_hooks(kinds)
        has_place = not kinds.static or self._static.has_place_for(now)
        if not has_place:
            kinds = NO_KIND
        as_given = None
        if kinds != NO_KIND:
            as_given = self._padding.why_as_given(now)
            if as_given is not None:
                kinds = NO_KIND
        preparer = self._preparer_of(now)
        for engine in self._candidates(kinds):
            if preparer is not None and preparer is not engine:
                self._program.release_prepared()
                preparer = None
            trained = engine.run(now, upcoming)
            if not isinstance(trained, Reason):
                self.last = engine
                break
            preparer = engine if engine.has_prepared(now) else None
            self._give_up(engine, trained)
        else:
            if preparer is not None:
                self._program.release_prepared()
            self.last, trained = self._eager, self._eager.run(now)
        self.last_kind = self._kind_of_last(now, as_given if has_place else _OTHER_LAYOUTS)
        self._program.record.note_step(self.last_kind)
        if self._jagged is not None and self.last is self._jagged:
            if self._padded is None and self._not_padded is None:
                self._try_padding(self._jagged)
            # The first jagged step was needed to know what of further batches can be done ahead.
            for batch in upcoming:
                self.prefetch(batch)
        return trained

    def _preparer_of(self, now: ReadBatch) -> StepEngine | None:
        """The engine whose step before has prepared ``now``; None for none."""
        if self._program.epochs is None:
            return None
        engines = (self._static, self._padded, self._jagged)
        return next((e for e in engines if e is not None and e.has_prepared(now)), None)

    def _run_eagerly(self, now: ReadBatch) -> TrainedBatch:
        """Train ``now`` where no step is captured."""
        self.last, trained = self._eager, self._eager.run(now)
        if self.last_kind.why is not self.not_captured:
            self.last_kind = StepKind(StepForm.EAGER, self.not_captured)
        self._program.record.note_step(self.last_kind)
        return trained

    def _kind_of_last(self, now: ReadBatch, why_eager: Reason | None) -> StepKind:
        """The kind of the step that has trained ``now``."""
        if self.last is self._eager:
            why = self.not_captured or self.hooks.reason or now.why or why_eager or _OTHER_RANK
            last = self.last_kind
            is_same = last.why is why and last.form is StepForm.EAGER
            return last if is_same else StepKind(StepForm.EAGER, why)
        if self.last is self._jagged:
            return StepKind(StepForm.JAGGED, self._not_padded or _FIRST_JAGGED)
        if not self.last.is_captured:
            return _WARMS_UP
        is_padded = self.last is not self._static or now.padded is not None
        return _PADDED if is_padded else _GRAPH

    def _kinds_with_hooks(self, agreed: BatchKinds) -> BatchKinds:
        """The kinds of step that can train a batch of kinds ``agreed`` while hooks are there."""
        eagerly = "train steps run eagerly until these are removed"
        if ranks.world_size() == 1 or agreed == NO_KIND:
            self.hooks.warn_once(eagerly)
            return NO_KIND
        # Other ranks may have no hooks, and the ranks have agreed on this batch before.
        self.hooks.warn_once(
            f"{eagerly}, from the next batch on that is read (call take_up_changes() on every "
            "rank to have them called for batches that were read before)"
        )
        return agreed

    def _candidates(self, kinds: BatchKinds) -> Iterator[StepEngine]:
        if kinds.static:
            yield self._static
        elif kinds.jagged:
            if self._padded is not None:
                yield self._padded
            if self._jagged is None:
                self._jagged = JaggedEngine(self._program)
            yield self._jagged

    def _give_up(self, engine: StepEngine, why: Reason) -> None:
        """Train without ``engine`` from now on; every rank does so at the same step."""
        # Graphs may be destroyed only once no replay of them runs.
        self._wait_for_steps()
        if engine is self._static:
            self.not_captured = why
            self.release()
        else:
            self._not_padded, self._padded = why, None
            engine.release()

    def _try_padding(self, jagged: JaggedEngine) -> None:
        """After the first jagged step, which has shown how the model looks ids up."""
        if ranks.any_rank(not jagged.can_be_padded):
            self._not_padded = _NOT_PADDED
        else:
            self._padded = PaddedEngine(self._program, jagged, self._wait_for_steps)
