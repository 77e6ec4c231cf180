"""A train step whose shapes do not change, on memory that stays where it is: one CUDA graph.

A step looks up, trains and updates one batch and prepares the next one. Two captured copies of it
alternate, one for each buffer index: what is prepared of a batch must stay where it is until the
batch is trained, while the next one is prepared. Each copy reads where the other one writes, so
nothing is copied between steps, and both share one memory pool, since they never run at once.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.core.named_range import named_range
from torchembed.core.trees import Tree
from torchembed.sharding.transport.collectives import GatheredSize, recorded_sizes
from torchembed.step.bucketized_buffers import Capacity
from torchembed.step.captured_call import CapturedCall
from torchembed.step.dense_updates import DenseUpdates, EarlyUpdates, LateUpdates, UpdatesOfMeans
from torchembed.step.forward_backward_update import ForwardBackwardUpdate, StepProgram
from torchembed.step.lookup_calls import LookupCall, observed_calls
from torchembed.step.prefetch import Prefetch
from torchembed.step.stages import LookedUpBatch, TrainedBatch
from torchembed.step.step_optimizers import Assumptions, StepOptimizers, prepare_replay
from torchembed.step.streams import StepStreams, fork, fork_and_join, join


class StaticStep:
    """Steps on batches of one layout; captured, or run as they are.

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
    """

    def __init__(
        self,
        program: StepProgram,
        example: Tree,
        calls: Sequence[LookupCall] | None = None,
        capacity: Capacity | None = None,
    ) -> None:
        self._program = program
        self._prefetch = Prefetch(example, program, calls, capacity)
        self.buffers, self.bucketized = self._prefetch.buffers, self._prefetch.bucketized
        self._optimizers = StepOptimizers(program.optimizers)
        self._assumptions = Assumptions(program.model, self._optimizers, program.device)
        self._sizes: list[GatheredSize] | None = None
        """The sizes that ranks exchanged in a step whose batch was prepared, and that prepared
        one."""
        self.done: torch.cuda.Event | None = None
        """Recorded once a GPU has done the last step."""
        self._captured: list[CapturedCall | None] = [None, None]
        self._gradients: list[list[tuple[Tensor, Tensor | None]]] = [[], []]
        self._trained: list[TrainedBatch | None] = [None, None]
        self._streams = StepStreams.on(program.device, of_several_ranks=program.group is not None)
        captured = self._optimizers.captured
        dense_updates: DenseUpdates = LateUpdates(captured)
        self._pool = None
        if program.is_cuda:
            self._pool = torch.cuda.graph_pool_handle()
            if self._streams.dense is None:
                dense_updates = EarlyUpdates(captured, program.device)
            else:
                dense_updates = UpdatesOfMeans(captured, self._streams.dense)
        self.dense_updates = dense_updates
        self._train = ForwardBackwardUpdate(program, self._optimizers, self._streams, dense_updates)

    @property
    def is_stale(self) -> bool:
        """True if the model or an optimizer changed in a way that steps do not follow."""
        return self._assumptions.are_stale

    @property
    def has_begun_update(self) -> bool:
        """True if a step has begun to change rows and parameters."""
        return self._train.has_begun_update

    def prepare(self, buffer: int) -> None:
        """Prepare the buffer's batch by itself, where no step before did it."""
        self._prefetch.prepare(buffer, in_place=self._has_captured)
        self.buffers.note_use(buffer)

    @property
    def can_capture(self) -> bool:
        """True if a step that a captured one can repeat has run as it is."""
        return self._sizes is not None

    def capture(self, buffer: int) -> None:
        """Capture the step that trains the buffer's batch, where :attr:`can_capture` says so.

        Waits for no other rank, whose capture may fail.
        """
        assert self._sizes is not None
        self._before_replay()  # what a graph does itself, it does at each replay
        if self.bucketized is not None and self._streams.step is not None:
            self.bucketized.capture(self._streams.step)
        self._assumptions.note_capture()
        sizes = self._sizes if self._has_fixed_shapes else None
        step = functools.partial(self._step, buffer)
        self._captured[buffer] = CapturedCall(step, sizes, self._streams.step, self._pool)
        if self._program.is_cuda:
            self._gradients[buffer] = self._optimizers.take_gradients_of_others()

    @property
    def _has_captured(self) -> bool:
        """True if a captured step reads and writes what is prepared where it is now."""
        return self._has_fixed_shapes and any(map(self.is_captured, (0, 1)))

    @property
    def _has_fixed_shapes(self) -> bool:
        """True if shapes follow from the layout; on a CPU, those of jagged batches do not."""
        return self._program.is_cuda or self.bucketized is None

    def is_captured(self, buffer: int) -> bool:
        """True if :meth:`run` replays a captured step."""
        return self._captured[buffer] is not None

    def release(self) -> None:
        """Destroy the graphs, which keep the ranks' communicators from being destroyed."""
        for captured in self._captured:
            if captured is not None:
                captured.release()
        self._captured = [None, None]
        if self.bucketized is not None:
            self.bucketized.release()
        # Before the buffers' memory is used for something else.
        for buffer in (0, 1):
            self.buffers.wait_until_filled(buffer)

    def run(self, buffer: int) -> TrainedBatch:
        """Train the buffer's batch, and prepare what lies in the other buffer.

        The tensors of the result are overwritten when the same buffer is trained again.
        """
        captured = self._captured[buffer]
        if captured is not None:
            self._before_replay()
            captured.replay()
            for parameter, grad in self._gradients[buffer]:
                parameter.grad = grad
        else:
            with fork_and_join(self._streams.step), recorded_sizes() as sizes:
                self._step(buffer)
            if self._prefetch.is_complete:
                self._sizes = sizes
        trained = self._trained[buffer]
        assert trained is not None
        self._train.update_others(trained)
        self.done = self.buffers.note_use(1 - buffer)
        return trained

    def _before_replay(self) -> None:
        prepare_replay((*self._optimizers.of_tables, *self._optimizers.captured))

    def _step(self, buffer: int) -> None:
        def prepare_next(after: torch.cuda.Stream | None) -> None:
            with fork(self._streams.ids), named_range("torchembed: prepare"):
                join(after)
                self._prefetch.prepare(1 - buffer, in_place=self._has_captured)

        before = self._trained[buffer]
        report_memory = None if before is None else before.report
        if self._prefetch.calls is None:
            model, batch = self._program.model, self._prefetch.batches[buffer]
            with observed_calls(model, batch) as self._prefetch.calls:
                trained = self._train(LookedUpBatch(batch), prepare_next, report_memory)
        else:
            trained = self._train(self._look_up(buffer), prepare_next, report_memory)
        self._trained[buffer] = trained

    def _look_up(self, buffer: int) -> LookedUpBatch:
        """The buffer's batch with its vectors, which come while the model begins its forward."""
        calls, admitted = self._prefetch.calls, self._prefetch.admitted[buffer]
        if not calls or admitted is None:
            return LookedUpBatch(self._prefetch.batches[buffer])
        with fork(self._streams.vectors), named_range("torchembed: look up"):
            lookups = [
                call.collection.look_up(of_call)
                for call, of_call in zip(calls, admitted.lookups, strict=True)
            ]
        return LookedUpBatch(
            admitted.data, calls, lookups, admitted.flag, admitted.checks, admitted.epoch
        )
