"""A train step whose shapes do not change, on memory that stays where it is: one CUDA graph.

A step looks up, trains and updates one batch and prepares the next one. Two captured copies of it
take turns, since what is prepared of a batch must stay where it is until the batch has been
trained, while the next one is prepared: each copy reads where the other one writes, so nothing is
copied between steps, and both share one memory pool, since they never run at the same time.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from torchembed.core.trees import map_tensors, tensors_in
from torchembed.modules.bad_ids import Suspect, deferred_bad_ids
from torchembed.modules.preparing import Prepared, PreparingModule
from torchembed.modules.table_module import TableModule
from torchembed.ops.weight_gradients import DeferredWeightGradients
from torchembed.optim import FusedOptimizer
from torchembed.tables import RecordedGradients
from torchembed.training.bad_batches import Verdict, either, judge
from torchembed.training.batch_slots import BatchSlots
from torchembed.training.collection_calls import CollectionCall, observed_calls
from torchembed.training.guarded_update import before_replay, follows_replays, step_unless
from torchembed.training.loss import ComputeLoss


class StepResult(NamedTuple):
    """What a step gives, on the device and detached from autograd."""

    loss: Tensor
    """``[]``, this rank's."""
    output: Any
    """The model's, a tree of tensors: logits, where there is a loss function."""
    batch: Any
    """What was trained."""


class _PreparedBatch(NamedTuple):
    """What is found out about a batch while the one before is trained."""

    lookups: list[Prepared]
    verdict: Verdict | None


class StaticStep:
    """Steps on batches of one layout; captured, or run as they are.

    Batches come into ``slots`` 0 and 1 in turn, and :meth:`run` takes the turn of the slot whose
    batch it trains. A collection of the model is prepared ahead where it is called with features
    whose tensors are the batch's own; the first step finds out which are. Others work too: their
    ids are routed in their forward.

    Args:
        example: a batch of the layout.
        group: the ranks that train together; None for one.
    """

    def __init__(
        self,
        model: nn.Module,
        compute_loss: ComputeLoss,
        optimizers: Sequence[torch.optim.Optimizer],
        example: Any,
        device: torch.device,
        group: Any,
    ) -> None:
        self.slots = BatchSlots(example, device)
        self._model, self._compute_loss, self._group = model, compute_loss, group
        modules = [module for module in model.modules() if isinstance(module, TableModule)]
        self._table_sets = [module._table_set for module in modules]
        self._parameters, self._modules = list(model.parameters()), list(model.modules())
        self._is_cuda = device.type == "cuda"
        self._model_before = self._model_now()
        self._optimizers = list(optimizers)
        self._table_optimizers = [o for o in optimizers if isinstance(o, FusedOptimizer)]
        captured = [o for o in optimizers if follows_replays(o)]
        self._dense_optimizers = [o for o in captured if not isinstance(o, FusedOptimizer)]
        self._other_optimizers = [o for o in optimizers if not follows_replays(o)]
        self._batches = [map_tensors(torch.empty_like, batch) for batch in self.slots.batches]
        self._calls: list[CollectionCall] | None = None
        self._prepared: list[_PreparedBatch | None] = [None, None]
        self._prepared_suspects: list[list[Suspect]] = [[], []]
        self._has_captured = False
        """From the first capture on, what is prepared stays where it is."""
        self._states: list[int] = []
        self._turns = [_Turn(), _Turn()]
        self._vectors_stream = self._ids_stream = self._rows_stream = self._leaves_stream = None
        if self._is_cuda:
            # What others wait for goes first where several streams have kernels to run; the updates
            # of rows fill the GPU for long, and leave room to the next batch's small kernels.
            self._stream = torch.cuda.Stream(device, priority=-3)
            self._vectors_stream = torch.cuda.Stream(device, priority=-3)
            self._rows_stream = torch.cuda.Stream(device)
            self._ids_stream = torch.cuda.Stream(device, priority=-1)
            self._leaves_stream = torch.cuda.Stream(device)
            self._pool = torch.cuda.graph_pool_handle()

    def _model_now(self) -> Any:
        groups = [list(table_set.current_groups()) for table_set in self._table_sets]
        parameters = [(p.data_ptr(), p.requires_grad) for p in self._parameters]
        return groups, parameters, [module.training for module in self._modules]

    def _states_now(self) -> list[int]:
        """Where the states of torch's own captured optimizers are, since loading moves them, and
        the learning rates that captured steps read."""
        states = [
            state
            for optimizer in self._dense_optimizers
            if not hasattr(optimizer, "before_replay")
            for of_parameter in optimizer.state.values()
            for state in of_parameter.values()
        ]
        captured = (*self._table_optimizers, *self._dense_optimizers)
        rates = [group["lr"] for optimizer in captured for group in optimizer.param_groups]
        rates = [r for r in rates if isinstance(r, Tensor) and r.is_cuda == self._is_cuda]
        return [tensor.data_ptr() for tensor in (*states, *rates) if isinstance(tensor, Tensor)]

    @property
    def is_stale(self) -> bool:
        """Whether tables were regrouped since, parameters frozen or given other memory, modules set
        to training or evaluation, or states or learning rates that a capture knows replaced."""
        moved = self._has_captured and self._states != self._states_now()
        return moved or self._model_before != self._model_now()

    def prepare(self, turn: int) -> None:
        """Prepare the batch in slot ``turn`` by itself, where no step before did it."""
        self._prepare(turn)
        self.slots.note_use(turn)

    def capture(self, turn: int) -> None:
        """Capture the step of ``turn``, that a step of each turn has run before as it is."""
        self._before_replay()  # what a graph does itself, it does at each replay
        self._has_captured, self._states = True, self._states_now()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            self._step(turn)
        self._turns[turn].graph = graph
        self._keep_gradients(turn)

    def is_captured(self, turn: int) -> bool:
        """Whether :meth:`run` replays a graph."""
        return self._turns[turn].graph is not None

    def release(self) -> None:
        """Destroy the graphs, which keep the ranks' communicators from being destroyed."""
        for state in self._turns:
            if state.graph is not None:
                state.graph.reset()
                state.graph = None
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
        elif self._is_cuda:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._step(turn)
            torch.cuda.current_stream().wait_stream(self._stream)
        else:
            self._step(turn)
        self._update(self._other_optimizers, state.verdict)
        self.slots.note_use(1 - turn)
        assert state.result is not None
        return state.result

    def _before_replay(self) -> None:
        for optimizer in (*self._table_optimizers, *self._dense_optimizers):
            before_replay(optimizer)

    def verdict(self, turn: int) -> tuple[Tensor | None, list[Suspect]]:
        """Of the last step of ``turn``: what :meth:`Verdict.to_host` gave, and the suspects."""
        return self._turns[turn].report, self._turns[turn].suspects

    def _step(self, turn: int) -> None:
        state = self._turns[turn]
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        batch, prepared = self._batches[turn], self._prepared[turn]
        with record_function("torchembed: forward"), deferred_bad_ids() as suspects:
            if self._calls is None:
                with observed_calls(self._model, batch) as self._calls:
                    loss, output = self._compute_loss(self._model, batch)
            else:
                with self._handing_over(self._looked_up(prepared)):
                    loss, output = self._compute_loss(self._model, batch)
        verdict = judge(suspects, self._group)
        state.suspects = suspects
        if prepared is not None:
            verdict = either(prepared.verdict, verdict)
            state.suspects = [*self._prepared_suspects[turn], *suspects]
        # After forward, so that its exchange of ids delays none of this step's vectors.
        with self._beside(self._ids_stream), record_function("torchembed: prepare"):
            state.tell_host(verdict)
            self._prepare(1 - turn)
        leaves_stream = self._backward_stream()
        with DeferredWeightGradients():
            with record_function("torchembed: backward"), self._beside(leaves_stream):
                loss.backward()
            recorded = self._update_rows(verdict)
        self._join(leaves_stream)
        with record_function("torchembed: update"):
            self._update(self._dense_optimizers, verdict)
        self._join(self._rows_stream if recorded else None)
        self._join(self._ids_stream, self._vectors_stream if self._calls else None)
        output = map_tensors(Tensor.detach, output)
        state.result = StepResult(loss.detach(), output, batch)

    def _backward_stream(self) -> torch.cuda.Stream | None:
        """Where to call backward.

        The caller's stream then waits for every stream on which a leaf got its gradient, also for
        the vectors', whose leaves are tables; deferred gradients of weights need not wait for that.
        """
        groups = [group for of_set in self._table_sets for group in of_set.current_groups()]
        return self._leaves_stream if all(group.rule for group in groups) else None

    def _looked_up(self, prepared: _PreparedBatch | None) -> list[Prepared]:
        """What is prepared, with its vectors, which come while the model begins its forward."""
        if prepared is None or self._calls is None:
            return []
        with self._beside(self._vectors_stream):
            return [
                call.collection.look_up(of_call)
                for call, of_call in zip(self._calls, prepared.lookups, strict=True)
            ]

    @contextlib.contextmanager
    def _handing_over(self, looked_up: list[Prepared]) -> Any:
        by_collection: dict[PreparingModule, list[Prepared]] = {}
        for call, of_call in zip(self._calls or (), looked_up, strict=False):
            by_collection.setdefault(call.collection, []).append(of_call)
        with contextlib.ExitStack() as stack:
            for collection, of_collection in by_collection.items():
                stack.enter_context(collection.handing_over(of_collection))
            yield

    @contextlib.contextmanager
    def _beside(self, stream: torch.cuda.Stream | None) -> Any:
        """What is inside runs on ``stream``, beside what comes after it."""
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    @torch.no_grad()
    def _prepare(self, turn: int) -> None:
        """Take over the batch in slot ``turn``, and find out what its ids say."""
        _copy_tree(self.slots.batches[turn], self._batches[turn])
        if not self._calls:
            return
        with deferred_bad_ids() as suspects:
            lookups = [call.prepare(self._batches[turn]) for call in self._calls]
        found = _PreparedBatch(lookups, judge(suspects, self._group))
        known = self._prepared[turn]
        if known is not None and self._has_captured:
            _copy_tree(found, known)
        else:
            self._prepared[turn], self._prepared_suspects[turn] = found, suspects

    def _update(self, optimizers: Sequence[torch.optim.Optimizer], verdict: Verdict | None) -> None:
        for optimizer in optimizers:
            step_unless(optimizer, None if verdict is None else verdict.skip)

    def _update_rows(self, verdict: Verdict | None) -> list[RecordedGradients]:
        """Update rows, each table group's as soon as its gradients are there, beside what backward
        and the other optimizers have left to do.

        Returns:
            What must be held until the streams have joined, or its memory would be used again.
        """
        recorded = [entry for o in self._table_optimizers for entry in o.recorded()]
        if self._rows_stream is None:
            self._update(self._table_optimizers, verdict)
        elif recorded:
            with torch.cuda.stream(self._rows_stream), record_function("torchembed: rows"):
                self._update(self._table_optimizers, verdict)
        return recorded

    def _join(self, *streams: torch.cuda.Stream | None) -> None:
        """Let the step's stream wait for others."""
        for stream in streams:
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)

    def _keep_gradients(self, turn: int) -> None:
        """Of the captured gradients those that steps after the replay need; others make room."""
        groups = [group for optimizer in self._other_optimizers for group in optimizer.param_groups]
        kept = [parameter for group in groups for parameter in group["params"]]
        self._turns[turn].gradients = [(parameter, parameter.grad) for parameter in kept]
        for optimizer in self._optimizers:
            optimizer.zero_grad()


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


def _copy_tree(source: Any, target: Any) -> None:
    for new, old in zip(tensors_in(source), tensors_in(target), strict=True):
        if new is not old:
            old.copy_(new)
