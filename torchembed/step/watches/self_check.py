"""Compares captured steps with the model itself, from time to time.

A graph repeats what forward did when it was captured. Where forward depends on what no address
tells, as a counter or a schedule in Python, the model goes on to compute other numbers than the
graph, without an error. So that such a training does not go on unnoticed, forward is captured once
more, without updates. It is replayed now and then on the weights and the batch that a step is about
to train, and the model is called on the same. What both compute is compared: the outputs of all
modules and the loss, and with them the step's own loss and its dense gradients.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchembed.autograd.gradient_slots import GradientSlot, slot_of
from torchembed.core import ranks
from torchembed.optim.clipping import clip_gradients
from torchembed.step.forward_backward_update import StepProgram
from torchembed.step.stages import LookedUpBatch
from torchembed.step.step_optimizers import StepOptimizers
from torchembed.step.trained_modules import TrainedModules
from torchembed.step.watches.dropout_states import draws_unseen
from torchembed.step.watches.forward_numbers import (
    OTHER_NUMBERS,
    Number,
    Summary,
    first_difference,
    forward_summary,
)

_STEPS_TO_WAIT = 3
"""A comparison is read so many steps later, when the device has done it: the host is at most two
steps ahead."""


class _Comparison(NamedTuple):
    """Numbers of the graph and of the model for one batch, on their way to the host."""

    numbers: list[Number]
    by_graph: Tensor
    """float64 ``[numbers, 2]``, norms and sums; no rows where the graph has other numbers."""
    by_model: Tensor
    num_replays: int
    """The number of replays when it was begun."""


class SelfCheck:
    """The comparison of one captured step with its model.

    A difference counts where two comparisons in succession find one, so that a rounding which turns
    over what the model selects does not end the captured steps.

    Args:
        program: what a step does.
        optimizers: the program's.
        every: how many replays lie between comparisons; the first replay of all is compared.
    """

    @staticmethod
    def can_check(trained: TrainedModules) -> bool:
        """False for modules whose forward may not be called once more for a comparison: with
        compiled recurrent layers whose dropout cuDNN draws from a state of its own, which cannot be
        put back."""
        return not draws_unseen(trained)

    def __init__(self, program: StepProgram, optimizers: StepOptimizers, every: int) -> None:
        self._program, self._optimizers, self._every = program, optimizers, every
        self._replays: list[Callable[[], None] | None] = [None, None]
        self._of_graph: list[Summary] = [Summary(), Summary()]
        self._num_replays = 0
        self._next = 0
        """The number of replays before the next comparison."""
        self._comparison: _Comparison | None = None
        self._is_suspected = False

    def forward(self, buffer: int, look_up: Callable[[], LookedUpBatch]) -> None:
        """The call to capture for the batch of a buffer: forward, without an update."""
        with _without_backward(self._program.model):
            self._of_graph[buffer], _ = forward_summary(self._program, look_up())

    def note_capture(self, buffer: int, replay: Callable[[], None]) -> None:
        """Note how to replay :meth:`forward` of a buffer."""
        self._replays[buffer] = replay

    def begins_replay(self, buffer: int) -> bool:
        """Count a replay of a step, and return True where it is time to compare it."""
        self._num_replays += 1
        if self._comparison is not None or self._num_replays <= self._next:
            return False
        return self._replays[buffer] is not None

    @contextlib.contextmanager
    def around_replay(
        self, buffer: int, look_up: Callable[[], LookedUpBatch], loss: Tensor
    ) -> Iterator[None]:
        """A context for the replay of a step that :meth:`begins_replay` wants compared.

        The model, its gradients and random numbers are the same when the replay begins as before.
        Where ranks train together, all of them compare the same steps.

        Args:
            look_up: gives the batch of the step and its vectors.
            loss: holds the loss of the step once it was replayed.
        """
        replay = self._replays[buffer]
        assert replay is not None
        program = self._program
        with program.host_state.unchanged():
            replay()
        # Now, since the graph of forward and that of the step use the same memory.
        numbers, by_graph = self._of_graph[buffer].numbers, self._of_graph[buffer].values()
        self._optimizers.zero_grad()
        with program.host_state.unchanged():
            of_model, model_loss = forward_summary(program, look_up())
            model_loss.backward()
        if program.max_grad_norm is not None:
            clip_gradients(
                [parameter for _, parameter in program.named_parameters()],
                program.max_grad_norm,
                device=program.device,
                group=program.group,
            )
        of_model.add("the loss of the step", model_loss)
        slots = self._filled_slots()
        for name, _, grad in slots:
            of_model.add(name, grad)
        self._optimizers.zero_grad()
        yield
        of_step = Summary()
        of_step.add("the loss of the step", loss)
        for name, slot, _ in slots:
            of_step.add(name, slot.memory)
        by_graph, by_model = torch.cat([by_graph, of_step.values()]), of_model.values()
        if [*numbers, *of_step.numbers] != of_model.numbers:
            by_graph, by_model = by_graph[:0], by_model[:0]
        self._comparison = _Comparison(
            of_model.numbers, _to_host(by_graph), _to_host(by_model), self._num_replays
        )

    def found_difference(self) -> str | None:
        """Say what differs on some rank, where two comparisons found a difference; else None.

        Collective in the steps in which a comparison is read, which are the same on all ranks.
        """
        comparison = self._comparison
        if comparison is None or self._num_replays < comparison.num_replays + _STEPS_TO_WAIT:
            return None
        self._comparison = None
        difference = _difference(comparison)
        was_suspected, self._is_suspected = self._is_suspected, False
        if not ranks.any_rank(difference is not None):
            self._next = self._num_replays + self._every
            return None
        if not was_suspected:
            self._is_suspected = True
            return None
        return difference or "another rank found a difference, which its warning names"

    def _filled_slots(self) -> list[tuple[str, GradientSlot, Tensor]]:
        """The gradients of backward whose counterparts are still there after a replay: those that
        torchembed's optimizers keep in flat buffers."""
        found: list[tuple[str, GradientSlot, Tensor]] = []
        for name, parameter in self._program.named_parameters():
            slot = slot_of(parameter)
            if slot is not None and parameter.grad is not None:
                found.append((f"the gradient of {name}", slot, parameter.grad))
        return found


@contextlib.contextmanager
def _without_backward(model: nn.Module) -> Iterator[None]:
    """A context for a forward that no backward follows, for which ``DistributedDataParallel`` in
    ``model`` would go on waiting."""
    wrappers = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    syncs = [wrapper.require_forward_param_sync for wrapper in wrappers]
    with contextlib.ExitStack() as stack:
        for wrapper in wrappers:
            stack.enter_context(wrapper.no_sync())
        try:
            yield
        finally:
            # Such a forward has the next one take its buffers as they are.
            for wrapper, sync in zip(wrappers, syncs, strict=True):
                wrapper.require_forward_param_sync = sync


def _difference(comparison: _Comparison) -> str | None:
    """The first difference in words; None for none."""
    if len(comparison.by_graph) < len(comparison.numbers):
        return OTHER_NUMBERS
    by_both = comparison.by_graph.tolist(), comparison.by_model.tolist()
    return first_difference(comparison.numbers, *by_both, ("in the graph", "without it"))


def _to_host(values: Tensor) -> Tensor:
    """A copy that is there once the device has done what the current stream holds."""
    memory = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return memory.copy_(values, non_blocking=True)
