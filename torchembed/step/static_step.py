"""A train step whose shapes do not change, on memory that stays where it is: one CUDA graph.

A step looks up, trains and updates one batch and prepares the next one. Two captured copies of it
take turns, since what is prepared of a batch must stay where it is until the batch has been
trained, while the next one is prepared: each copy reads where the other one writes, so nothing is
copied between steps, and both share one memory pool, since they never run at the same time.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchembed.core.named_range import named_range
from torchembed.core.trees import map_tensors
from torchembed.modules.bad_ids import Suspect, deferred_bad_ids
from torchembed.modules.preparing import Prepared
from torchembed.sharding.transport.collectives import GatheredSize, known_sizes, noted_sizes
from torchembed.step.bad_batches import Verdict, either, judge, skip_of
from torchembed.step.batches_ahead import BatchesAhead, PreparedBatch
from torchembed.step.collection_calls import CollectionCall, handing_over, observed_calls
from torchembed.step.loss import ComputeLoss
from torchembed.step.sorted_ids import Room
from torchembed.step.step_optimizers import (
    Assumptions,
    StepOptimizers,
    prepare_replay,
    update,
    update_early,
)
from torchembed.step.step_result import StepResult
from torchembed.step.streams import StepStreams, beside, between, join, on
from torchembed.step.weight_updates import EarlyUpdates, LateUpdates, UpdatesOfMeans
from torchembed.tables import RecordedGradients, table_of


class StaticStep:
    """Steps on batches of one layout; captured, or run as they are.

    Batches come into ``slots`` 0 and 1 in turn, and :meth:`run` takes the turn of the slot whose
    batch it trains. A collection of the model is prepared ahead where it is called with features
    whose tensors are the batch's own; the first step finds out which are. Others work too: their
    ids are routed in their forward.

    Args:
        example: a batch of the layout.
        calls: all lookups of the model; needed where there is a ``room``.
        room: for jagged batches, whose layout is that of ``example`` but for the lengths of bags.
            Slots take them as :func:`with_sparse_features` gives them; the model's are on the meta
            device.
        group: the ranks that train together; None for one.
    """

    def __init__(
        self,
        model: nn.Module,
        compute_loss: ComputeLoss,
        optimizers: Sequence[torch.optim.Optimizer],
        example: Any,
        calls: Sequence[CollectionCall] | None = None,
        room: Room | None = None,
        *,
        device: torch.device,
        group: Any,
    ) -> None:
        self._ahead = BatchesAhead(example, calls, room, device=device, group=group)
        self.slots, self.sorted = self._ahead.slots, self._ahead.sorted
        self._model, self._compute_loss, self._group = model, compute_loss, group
        self.is_cuda = device.type == "cuda"
        self._optimizers = StepOptimizers(optimizers)
        self._assumptions = Assumptions(model, self._optimizers, device)
        self._sizes: list[GatheredSize] | None = None
        """What ranks told each other in a step that had its batch prepared, and prepared one."""
        self.has_begun_update = False
        """Whether a step has begun to change rows and parameters."""
        self.done: torch.cuda.Event | None = None
        """What comes once a GPU has done the last step."""
        self._turns = [_Turn(), _Turn()]
        self._streams = StepStreams.on(device, of_several_ranks=group is not None)
        captured = self._optimizers.captured
        self._weights = LateUpdates(captured)
        if self.is_cuda:
            self._pool = torch.cuda.graph_pool_handle()
            if self._streams.dense is None:
                self._weights = EarlyUpdates(captured, device)
            else:
                self._weights = UpdatesOfMeans(captured, self._streams.dense)

    @property
    def is_stale(self) -> bool:
        """Whether what its steps take for granted has changed."""
        return self._assumptions.are_stale

    def prepare(self, turn: int) -> None:
        """Prepare the batch in slot ``turn`` by itself, where no step before did it."""
        self._ahead.prepare(turn, in_place=self._has_captured)
        self.slots.note_use(turn)

    def capture(self, turn: int) -> None:
        """Capture the step of ``turn``, where :attr:`can_capture` says so.

        Waits for no other rank, whose capture may fail.
        """
        assert self._sizes is not None
        self._before_replay()  # what a graph does itself, it does at each replay
        if self.sorted is not None:
            assert self._streams.step is not None
            self.sorted.capture(self._streams.step)
        self._assumptions.note_capture()
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.graph(
                graph,
                pool=self._pool,
                stream=self._streams.step,
                capture_error_mode="thread_local",
            ),
            known_sizes(self._sizes),
        ):
            self._step(turn)
        self._turns[turn].graph = graph
        self._turns[turn].gradients = self._optimizers.take_gradients_of_others()

    @property
    def can_capture(self) -> bool:
        """Whether it is on a GPU, and a step has run as it is that a captured one repeats."""
        return self.is_cuda and self._sizes is not None

    @property
    def _has_captured(self) -> bool:
        """Whether a graph reads and writes what is prepared where it is now."""
        return any(self.is_captured(turn) for turn in (0, 1))

    def is_captured(self, turn: int) -> bool:
        """Whether :meth:`run` replays a graph."""
        return self._turns[turn].graph is not None

    def release(self) -> None:
        """Destroy the graphs, which keep the ranks' communicators from being destroyed."""
        for state in self._turns:
            if state.graph is not None:
                state.graph.reset()
                state.graph = None
        if self.sorted is not None:
            self.sorted.release()
        # Before the slots' memory is used for something else.
        for slot in (0, 1):
            self.slots.wait_until_filled(slot)

    def run(self, turn: int) -> StepResult:
        """Train the batch of ``turn``, and prepare what lies in the other slot.

        The tensors of the result are overwritten when the turn comes again.
        """
        state = self._turns[turn]
        if state.graph is not None:
            self._before_replay()
            state.graph.replay()
            for parameter, grad in state.gradients:
                parameter.grad = grad
        else:
            with between(self._streams.step), noted_sizes() as sizes:
                self._step(turn)
            if self._ahead.are_prepared:
                self._sizes = sizes
        update(self._optimizers.others, skip_of(state.verdict))
        self.done = self.slots.note_use(1 - turn)
        assert state.result is not None
        return state.result

    def _before_replay(self) -> None:
        prepare_replay((*self._optimizers.of_tables, *self._optimizers.captured))

    def verdict(self, turn: int) -> tuple[Tensor | None, list[Suspect]]:
        """Of the last step of ``turn``: what :meth:`Verdict.to_host` gave, and the suspects."""
        return self._turns[turn].report, self._turns[turn].suspects

    def _step(self, turn: int) -> None:
        state, streams = self._turns[turn], self._streams
        self._optimizers.zero_grad()
        ahead = self._ahead
        batch, prepared = ahead.batches[turn], ahead.prepared[turn]
        looked_up: list[Prepared] = []
        with named_range("torchembed: forward"), deferred_bad_ids() as suspects:
            if ahead.calls is None:
                with observed_calls(self._model, batch) as ahead.calls:
                    loss, output = self._compute_loss(self._model, batch)
            else:
                looked_up = self._looked_up(prepared)
                if looked_up:
                    # On several ranks its exchange would delay this step's vectors.
                    vectors = None if self._group is None else streams.vectors
                    self._prepare_beside(1 - turn, after=vectors)
                with handing_over(ahead.calls if looked_up else [], looked_up):
                    loss, output = self._compute_loss(self._model, batch)
        verdict = judge(suspects, self._group)
        state.suspects = suspects
        if prepared is not None:
            verdict = either(prepared.verdict, verdict)
            state.suspects = [*ahead.suspects[turn], *suspects]
        with beside(streams.ids):
            state.tell_host(verdict)
        if not looked_up:
            self._prepare_beside(1 - turn)
        for stream in (streams.rows, streams.last_rows):
            if stream is not None:
                # Before backward: the update of rows begins with what needs no gradients.
                stream.wait_stream(torch.cuda.current_stream())
        skip, leaves_stream = skip_of(verdict), self._backward_stream()
        with self._weights.around_backward(skip):
            with named_range("torchembed: backward"), beside(leaves_stream):
                loss.backward()
            self.has_begun_update = True
            recorded = self._update_rows(skip, early=True)
        # Of tables that every rank holds, gradients come with the dense ones.
        recorded += self._update_rows(skip, early=False)
        join(leaves_stream)
        with named_range("torchembed: update"):
            self._weights.update(skip)
        join(streams.rows, streams.last_rows)
        del recorded
        join(streams.ids, streams.vectors if ahead.calls else None)
        output = map_tensors(Tensor.detach, output)
        state.result = StepResult(loss.detach(), output, batch)

    def _backward_stream(self) -> torch.cuda.Stream | None:
        """Where to call backward.

        The caller's stream then waits for every stream on which a leaf got its gradient, also for
        the vectors', whose leaves are tables; deferred gradients of weights need not wait for that.
        """
        tables = [table for p in self._model.parameters() if (table := table_of(p)) is not None]
        return self._streams.leaves if all(table.group.rule for table in tables) else None

    def _looked_up(self, prepared: PreparedBatch | None) -> list[Prepared]:
        """What is prepared, with its vectors, which come while the model begins its forward."""
        calls = self._ahead.calls
        if prepared is None or calls is None:
            return []
        with beside(self._streams.vectors):
            return [
                call.collection.look_up(of_call)
                for call, of_call in zip(calls, prepared.lookups, strict=True)
            ]

    def _prepare_beside(self, turn: int, after: torch.cuda.Stream | None = None) -> None:
        """Prepare a batch on a stream of its own, ``after`` what another one has got."""
        with beside(self._streams.ids), named_range("torchembed: prepare"):
            join(after)
            self._ahead.prepare(turn, in_place=self._has_captured)

    def _update_rows(self, skip: Tensor | None, *, early: bool) -> list[RecordedGradients]:
        """Update rows, each table group's as soon as its gradients are there, beside what backward
        and the other optimizers have left to do. ``early`` while some may still be on their way.

        Returns:
            What must be held until the streams have joined, or its memory would be used again.
        """
        recorded = [entry for o in self._optimizers.of_tables for entry in o.recorded()]
        if recorded or not early:
            stream = self._streams.rows
            if not early and stream is not None and torch.cuda.is_current_stream_capturing():
                # Otherwise learning rates may be set on the former.
                stream = self._streams.last_rows
            with on(stream), named_range("torchembed: rows"):
                (update_early if early else update)(self._optimizers.of_tables, skip)
        return recorded


class _Turn:
    """One of the two copies of a step."""

    def __init__(self) -> None:
        self.graph: torch.cuda.CUDAGraph | None = None
        self.gradients: list[tuple[Tensor, Tensor | None]] = []
        self.result: StepResult | None = None
        self.verdict: Verdict | None = None
        self.suspects: list[Suspect] = []
        self.report: Tensor | None = None

    def tell_host(self, verdict: Verdict | None) -> None:
        """Take the ``verdict``, and copy it to the host's memory without waiting."""
        self.verdict = verdict
        if verdict is not None:
            # The first step may look the same ids up twice, that are prepared once from then on.
            is_alike = self.report is not None and len(self.report) == 1 + len(verdict.found)
            self.report = verdict.to_host(self.report if is_alike else None)
