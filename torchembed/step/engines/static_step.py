"""A step whose shapes do not change, on memory that stays where it is: one CUDA graph.

It looks up, trains and updates one batch and prepares the next one. Two captured copies of it
alternate, one for each buffer index: what is prepared of a batch must stay where it is until the
batch is trained, while the next one is prepared. Each copy reads where the other one writes, so
nothing is copied between steps, and both share one memory pool, since they never run at once.
Where the next batch has another layout than this one, it is prepared by a further graph, right
before the step of its layout.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchembed.core.trees import Tree
from torchembed.modules.lookup.forward_admission import forward_admissions
from torchembed.sharding.transport.collectives import GatheredSize, recorded_sizes
from torchembed.step.batches.bucketized_buffers import Capacity
from torchembed.step.batches.input_buffers import InputBuffers
from torchembed.step.batches.prefetch import Prefetch
from torchembed.step.engines.captured_call import CapturedCall
from torchembed.step.engines.captured_preparation import CapturedPreparation
from torchembed.step.engines.collective_capture import failure_on_any_rank
from torchembed.step.engines.step_resources import StepResources
from torchembed.step.forward_backward_update import ForwardBackwardUpdate, StepProgram
from torchembed.step.look_up_batch import looked_up_batch
from torchembed.step.lookup_calls import LookupCall, observed_fixed_calls
from torchembed.step.stages import LookedUpBatch, ReadBatch, Reason, TrainedBatch
from torchembed.step.step_optimizers import update
from torchembed.step.step_result import ResultPlace
from torchembed.step.streams import fork, fork_and_join, join, named_range
from torchembed.step.watches.attribute_uses import LeftAttribute
from torchembed.step.watches.self_check import SelfCheck
from torchembed.step.watches.watched_values import NotCapturable

_WARM_UP_STEPS = 3
"""Before the first capture: the first finds out what is prepared ahead, the next two do it once for
each buffer; kernels are compiled and communicators made on the way. Steps on further layouts take
one less."""

_ADMITS = (
    "forward gives rows to ids that it computes, or was called with in another way than the batch "
    "has them, which a comparison with the model would do once more; give it the batch's own ids"
)


class StaticStep:
    """Steps on batches of one layout: as they are while they warm up, then captured.

    Batches come into the two input buffers alternately, and :meth:`run` trains the batch of one
    while it prepares that of the other. A collection of the model is prepared ahead where it is
    called with features made of the batch's own tensors; the first step finds out which are. Others
    work too: their ids are routed in their forward.

    Args:
        program: what a step does.
        example: a batch of the layout.
        calls: all lookup calls of the model; needed where there is a ``capacity``.
        capacity: for jagged batches, whose layout is that of ``example`` but for the lengths of
            bags. Buffers take them as :func:`with_sparse_features` gives them; the model's are on
            the meta device.
        resources: shared with steps on other layouts; its own by default.
        buffers: for batches of the layout; its own by default.

    Attributes:
        capacity: as given.
        has_replayed: whether the last step was a replay.
    """

    def __init__(
        self,
        program: StepProgram,
        example: Tree,
        calls: Sequence[LookupCall] | None = None,
        capacity: Capacity | None = None,
        *,
        resources: StepResources | None = None,
        buffers: InputBuffers | None = None,
    ) -> None:
        self._program, self.capacity = program, capacity
        self._resources = StepResources(program) if resources is None else resources
        self._prefetch = Prefetch(example, program, calls, capacity, buffers)
        self.buffers, self.bucketized = self._prefetch.buffers, self._prefetch.bucketized
        self._optimizers, self._streams = self._resources.optimizers, self._resources.streams
        self._sizes: list[GatheredSize] | None = None
        """The sizes that ranks exchanged in a step whose batch was prepared, and that prepared
        one."""
        self._admits_in_forward: Reason | None = None
        """The module whose forward gave new ids rows in the last step."""
        self._num_steps = 0
        # Others have compiled kernels and made communicators.
        self._num_warm_ups = _WARM_UP_STEPS - self._resources.has_captured
        self._prepared: int | None = None
        """The number of the batch that the step before has prepared."""
        self._prepares_next = False
        """True once a step, which may fail all the same, has prepared the other buffer's batch."""
        self._captured: list[CapturedCall | None] = [None, None]
        self._preparations = [CapturedPreparation(self._prefetch, buffer) for buffer in (0, 1)]
        self.has_replayed = False
        self._captured_forwards: list[CapturedCall] = []
        self._self_check: SelfCheck | None = None
        if program.self_check_every is not None and SelfCheck.can_check(program.trained):
            self._self_check = SelfCheck(program, self._optimizers, program.self_check_every)
        self._gradients: list[list[tuple[Tensor, Tensor | None]]] = [[], []]
        self._left: list[list[LeftAttribute]] = [[], []]
        """Attributes of modules that replays leave behind."""
        self._in_slots: list[tuple[Tensor, Tensor]] = []
        """Dense parameters with gradients that both buffers' captured steps write."""
        self._trained: list[TrainedBatch | None] = [None, None]
        self._places = [
            ResultPlace(self._resources.results, holds_features=capacity is None) for _ in range(2)
        ]
        """The places of the results of the two buffers' batches."""
        self._losses: list[Tensor | None] = [None, None]
        """Memory for the losses of captured steps, outside of the graphs' pool; None before."""
        self.dense_updates = self._resources.dense_updates
        self._train = ForwardBackwardUpdate(
            program, self._optimizers, self._streams, self.dense_updates
        )

    @property
    def is_stale(self) -> bool:
        """True if the model or an optimizer changed in a way that steps do not follow."""
        return self._resources.are_stale

    @property
    def is_captured(self) -> bool:
        """True if all further steps are replays."""
        return None not in self._captured

    @property
    def has_begun_update(self) -> bool:
        """True if a step has begun to change rows and parameters."""
        return self._train.has_begun_update

    def has_prepared(self, now: ReadBatch) -> bool:
        """True if the step before has prepared ``now``."""
        return self._prepared == now.number

    def make_ready(self, now: ReadBatch) -> Reason | None:
        """Make the step ready for ``now``, which is in its buffer; captures it once it is warm.

        Collective where the step is captured: every rank does it for the same step.

        Returns:
            The reason why the step cannot be captured, which a warning has said; else None.
        """
        difference = None if self._self_check is None else self._self_check.found_difference()
        if difference is not None:
            warnings.warn(
                "the graph of the train step computes other numbers than the model does, so train "
                f"steps run eagerly from now on: {difference}. A graph repeats what forward did "
                "when it was captured; keep what changes from step to step in tensors, and change "
                "them in place",
                stacklevel=5,  # whoever called the pipeline
            )
            return Reason(f"the graph differed from the model: {difference}")
        buffer = now.buffer
        # Out here and not in the step: a captured step cannot wait for an event of another stream's
        # copy that was recorded outside it.
        self.buffers.wait_until_filled(1 - buffer)
        # A step that has prepared this batch has waited for it.
        if self._prepared != now.number:
            self.buffers.wait_until_filled(buffer)
            # The batch may have rows of one that was prepared and is not trained, whose lines are
            # still being read.
            self._program.wait_for_lines()
            failure = self._prepare(buffer)
            if failure is not None:
                return failure
            self.buffers.note_use(buffer)
            self._prepared = now.number
        is_warm = self._num_steps >= self._num_warm_ups and self._sizes is not None
        if not is_warm or self._captured[buffer] is not None:
            return None
        # A fault of a disk is none of the capture, and no thread may change what one works on.
        self._program.wait_for_lines()
        return failure_on_any_rank(lambda: self._capture(buffer), self._program.host_state)

    def _prepare(self, buffer: int) -> Reason | None:
        """Prepare the buffer's batch, by a graph where that was done without one before.

        Returns:
            The reason why it cannot be captured, which a warning has said; else None.
        """
        preparation = self._preparations[buffer]
        if preparation.can_be_captured and self.bucketized is None and self._has_fixed_shapes:
            failure = failure_on_any_rank(
                lambda: preparation.capture(self._captured_call), self._program.host_state
            )
            if failure is not None:
                return failure
        preparation(in_place=self._has_captured)
        return None

    def _captured_call(
        self, call: Callable[[], None], sizes: Sequence[GatheredSize] | None
    ) -> CapturedCall:
        return CapturedCall(call, sizes, self._streams.step, self._resources.pool)

    def _capture(self, buffer: int) -> None:
        """Capture the step that trains the buffer's batch, once one that it can repeat has run.

        Waits for no other rank, whose capture may fail.
        """
        assert self._sizes is not None
        why = self._program.values.unsteady or self._program.host_state.drawn
        why = why or self._admits_in_forward
        if why is not None:
            raise NotCapturable(why)
        self._resources.has_captured = True
        self._program.values.held = self._program.values.version
        self._optimizers.prepare_replay()  # what a graph does itself, it does at each replay
        if self.bucketized is not None and self._streams.step is not None:
            self.bucketized.capture(self._streams.step)
        self._resources.assumptions.note_capture()
        sizes = self._sizes if self._has_fixed_shapes else None
        before = next(trained for trained in self._trained if trained is not None)
        self._losses[buffer] = torch.empty_like(before.result.loss)
        step = functools.partial(self._step, buffer)
        uses = self._program.attribute_uses
        with uses.observed() as observed:
            captured = self._captured_call(step, sizes)
        if not captured.calls_again:
            self._left[buffer] = uses.left_by(observed)
        self._captured[buffer] = captured
        if captured.calls_again:
            self._losses[buffer] = None
        else:
            self._places[buffer].is_replayed = True
            self._in_slots = self._optimizers.gradients_in_slots()
            self._gradients[buffer] = self._optimizers.take_gradients_of_others()
            self._capture_forward(buffer)
        self._program.record.note_capture()

    def _capture_forward(self, buffer: int) -> None:
        """Capture what the self-check compares with the model."""
        if self._self_check is None:
            return
        forward = functools.partial(self._self_check.forward, buffer, self.lookup(buffer))
        call = self._captured_call(forward, self._train.forward_sizes)
        self._captured_forwards.append(call)
        self._self_check.note_capture(buffer, call.replay)

    @property
    def _has_captured(self) -> bool:
        """True if a captured step reads and writes what is prepared where it is now."""
        return self._has_fixed_shapes and self._captured != [None, None]

    @property
    def _has_fixed_shapes(self) -> bool:
        """True if shapes follow from the layout; on a CPU, those of jagged batches do not."""
        return self._program.is_cuda or self._prefetch.has_fixed_shapes

    def release(self) -> None:
        """Destroy the graphs, which keep the ranks' communicators from being destroyed."""
        for preparation in self._preparations:
            preparation.release()
        for captured in (*self._captured, *self._captured_forwards):
            if captured is not None:
                captured.release()
        self._captured, self._captured_forwards = [None, None], []
        if self.bucketized is not None:
            self.bucketized.release()
        # Before the buffers' memory is used for something else.
        for buffer in (0, 1):
            self.buffers.wait_until_filled(buffer)

    def run(self, now: ReadBatch, following: ReadBatch | None) -> TrainedBatch:
        """Train ``now``, which the step was made ready for, and prepare ``following``, which is in
        the other buffer; where there is none, no table admits what that buffer holds.

        The loss is overwritten when the same buffer is trained again, output and batch by the next
        step.
        """
        buffer = now.buffer
        if following is None:
            self.buffers.hold_back(1 - buffer)
        self._places[buffer].begin_step()
        self._prepares_next = False
        try:
            self._run(buffer)
            self._prepares_next = self._prefetch.has_prepared(1 - buffer)
            trained = self._trained[buffer]
            assert trained is not None
            update(self._optimizers.others, trained.skip)
        except BaseException:
            # What was admitted is not admitted once more.
            if following is not None and self._prepares_next:
                self._prepared = following.number
            raise
        self._num_steps += 1
        self._prepared = None
        if following is not None and self._prepares_next:
            self._prepared = following.number
        # The batch is held, since its buffer may be filled anew while its copy is under way.
        done = self.buffers.note_use(1 - buffer)
        return trained.held_until(done, source=now.data, place=self._places[buffer])

    def _run(self, buffer: int) -> None:
        """Take the step of the buffer's batch, by a replay where it is captured."""
        captured = self._captured[buffer]
        self.has_replayed = captured is not None
        if captured is not None:
            self._optimizers.prepare_replay()
            with self._compared(buffer):
                captured.replay()
            # A replay writes gradients to the memory of the capture. Optimizers that step outside
            # the graph look for them in .grad.
            for parameter, grad in self._gradients[buffer]:
                parameter.grad = grad
            for attribute in self._left[buffer]:
                attribute.put()
            # For whoever reads them after the step. The first one tells whether they were cleared.
            if self._in_slots and self._in_slots[0][0].grad is not self._in_slots[0][1]:
                for parameter, grad in self._in_slots:
                    parameter.grad = grad
        else:
            with (
                fork_and_join(self._streams.step),
                recorded_sizes() as sizes,
                self._program.host_state.observed(),
                self._program.attribute_uses.observed(),
            ):
                self._step(buffer)
            # A capture may ask no rank for sizes, so it takes those of a step that did the same
            # work.
            if self._prefetch.is_complete:
                self._sizes = sizes

    def _compared(self, buffer: int) -> contextlib.AbstractContextManager[object]:
        """A context for a replay, which may compare it with the model."""
        check, trained = self._self_check, self._trained[buffer]
        if check is None or not check.begins_replay(buffer):
            return contextlib.nullcontext()
        assert trained is not None
        return check.around_replay(buffer, self.lookup(buffer), trained.result.loss)

    def _step(self, buffer: int) -> None:
        has_dynamic, model = self._program.epochs is not None, self._program.model
        # A batch is admitted once, for all calls: not before these are known.
        admits = self._prefetch.calls is not None or not has_dynamic
        admissions = forward_admissions(model) if has_dynamic else {}

        def prepare_next(after: torch.cuda.Stream | None) -> None:
            with fork(self._streams.ids), named_range("torchembed: prepare"):
                join(after)
                self._prefetch.prepare(1 - buffer, in_place=self._has_captured, admits=admits)
            self._prepares_next = admits and bool(self._prefetch.calls)

        # Pinned memory cannot be allocated in a capture, so the report goes where the buffer's step
        # before has put its own.
        before = self._trained[buffer]
        report_memory = None if before is None else before.report
        if self._prefetch.calls is None:
            batch = self._prefetch.batches[buffer]
            with (
                observed_fixed_calls(model, batch) as self._prefetch.calls,
                self._program.padding.counted.observed(model, batch),
            ):
                trained = self._train(
                    LookedUpBatch(batch), prepare_next, report_memory, self._losses[buffer]
                )
            # Calls that are joined are known from now on, and nothing was prepared for them.
            self._prefetch.drop_incomplete()
        else:
            batch = self._look_up(buffer, self._streams.vectors)
            trained = self._train(batch, prepare_next, report_memory, self._losses[buffer])
        self._trained[buffer] = trained
        if has_dynamic:
            now = forward_admissions(model)
            names = [name for name, count in now.items() if count > admissions.get(name, count)]
            self._admits_in_forward = Reason(_ADMITS, names[0]) if names else None

    def lookup(self, buffer: int) -> Callable[[], LookedUpBatch]:
        """A function that looks up the buffer's batch, which is prepared, on the current stream."""
        return functools.partial(self._look_up, buffer, None)

    def _look_up(self, buffer: int, stream: torch.cuda.Stream | None) -> LookedUpBatch:
        """The buffer's batch with its vectors, which come while the model begins its forward where
        they have a ``stream`` of their own."""
        calls, admitted = self._prefetch.calls, self._prefetch.admitted[buffer]
        if not calls or admitted is None:
            return LookedUpBatch(self._prefetch.batches[buffer])
        # Forward goes on until the model calls the collection, which waits for the vectors.
        with fork(stream), named_range("torchembed: look up"):
            return looked_up_batch(calls, admitted, self._program.group)
