"""Compares captured steps with the model itself, from time to time.

A graph repeats what forward did when it was captured. Where forward depends on what no address
tells, as a counter or a schedule in Python, the model goes on to compute other numbers than the
graph, without an error. So that such a training does not go on unnoticed, forward is captured once
more, without updates. It is replayed now and then on the weights and the batch that a step is about
to train, and the model is called on the same. What both compute is compared: the outputs of all
modules and the loss, and with them the step's own loss and its dense gradients.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchembed.autograd.gradient_slots import GradientSlot, slot_of
from torchembed.core import ranks
from torchembed.core.trees import Tree, tensors_in
from torchembed.modules.bad_ids import deferred_id_checks
from torchembed.optim.clipping import clip_gradients
from torchembed.step.batches.counted_parts import for_model
from torchembed.step.forward_backward_update import StepProgram
from torchembed.step.lookup_calls import reusing
from torchembed.step.stages import LookedUpBatch
from torchembed.step.step_optimizers import StepOptimizers
from torchembed.step.trained_modules import TrainedModules
from torchembed.step.watches.called_modules import called_from_python
from torchembed.step.watches.dropout_states import draws_unseen

_DEVIATIONS = 8.0
"""How many standard deviations of rounding errors may lie between two ways to compute a number."""
_STEPS_TO_WAIT = 3
"""A comparison is read so many steps later, when the device has done it: the host is at most two
steps ahead."""


_PLAIN = frozenset((Tensor, nn.Parameter))
_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))


class Number(NamedTuple):
    """A tensor that is computed in two ways."""

    name: str
    shape: tuple[int, ...]
    epsilon: float
    """The distance from 1 to the next number of its dtype."""


class Summary:
    """The norm and the sum of each of several tensors, which stand for their elements.

    Both are computed in float64, so that they add no rounding of their own.
    """

    def __init__(self) -> None:
        self.numbers: list[Number] = []
        self._values: list[Tensor] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor of floats that is no subclass's nor sparse; others are left out."""
        is_plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
        if not is_plain or tensor.dtype not in _DTYPES:
            return
        tensor = tensor.detach()
        epsilon = torch.finfo(tensor.dtype).eps
        self.numbers.append(Number(name, tuple(tensor.shape), epsilon))
        norm = torch.linalg.vector_norm(tensor, dtype=torch.float64)
        self._values.append(torch.stack([norm, tensor.sum(dtype=torch.float64)]))

    def values(self) -> Tensor:
        """float64 ``[numbers, 2]``, in memory of its own."""
        return torch.stack(self._values)


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
                program.trained.parameters(),
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
        for name, parameter in self._program.trained.named_parameters():
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


def forward_summary(program: StepProgram, batch: LookedUpBatch) -> tuple[Summary, Tensor]:
    """Run forward. Returns the outputs of all modules and, last, the loss; and the loss."""
    summary = Summary()
    with (
        deferred_id_checks(),
        observed_outputs(program.model, summary),
        reusing(batch.calls, batch.lookups, batch.data),
    ):
        loss, _ = program.compute_loss(program.model, for_model(batch.data))
    summary.add("the loss", loss)
    return summary, loss


def _difference(comparison: _Comparison) -> str | None:
    """The first difference in words; None for none."""
    if len(comparison.by_graph) < len(comparison.numbers):
        return OTHER_NUMBERS
    by_both = comparison.by_graph.tolist(), comparison.by_model.tolist()
    return first_difference(comparison.numbers, *by_both, ("in the graph", "without it"))


OTHER_NUMBERS = "forward calls other modules than it did, or with tensors of other shapes"


def first_difference(
    numbers: Sequence[Number],
    by_one: Sequence[Sequence[float]],
    by_other: Sequence[Sequence[float]],
    ways: tuple[str, str],
) -> str | None:
    """The first number that differs by more than rounding explains, in words; None for none.

    The error of a norm, as a part of it, has a deviation of one rounding over the root of the
    number of elements, whose own roundings are independent. Errors of the numbers before it are
    independent too, but shared by all that is computed of one sample: they add one rounding each,
    over the root of the number of samples.

    Args:
        numbers: in the order in which they are computed.
        by_one, by_other: for each of them its norm and sum, computed in one of two ways.
        ways: in words.
    """
    num_samples = max((shape[0] for _, shape, _ in numbers if shape), default=1)
    largest = 0.0
    for position, (number, one, other) in enumerate(zip(numbers, by_one, by_other, strict=True)):
        num_elements = max(math.prod(number.shape), 1)
        largest = max(largest, number.epsilon)
        inherited = largest * math.sqrt((position + 1) / max(num_samples, 1))
        norm = other[0] * _DEVIATIONS * (number.epsilon / math.sqrt(num_elements) + inherited)
        # A sum of n errors is at most the root of n times their norm.
        limits = norm, norm * math.sqrt(num_elements)
        for what, a, b, limit in zip(("norm", "sum"), one, other, limits, strict=True):
            is_same = a == b or (math.isnan(a) and math.isnan(b))
            if not is_same and not abs(a - b) <= limit:
                return f"{number.name} has the {what} {a:.9g} {ways[0]}, and {b:.9g} {ways[1]}"
    return None


def _to_host(values: Tensor) -> Tensor:
    """A copy that is there once the device has done what the current stream holds."""
    memory = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return memory.copy_(values, non_blocking=True)


@contextlib.contextmanager
def observed_outputs(model: nn.Module, summary: Summary) -> Iterator[None]:
    """Within it, what modules of ``model`` return is added to ``summary``, call by call."""

    def note(name: str, module: nn.Module, arguments: Tree, output: Tree) -> None:
        del arguments
        for tensor in tensors_in(output):
            summary.add(f"the output of {name} ({type(module).__name__})", tensor)

    hooks = [
        module.register_forward_hook(functools.partial(note, name or "the model"))
        for name, module in called_from_python(model)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
