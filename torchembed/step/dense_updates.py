"""Updates of dense weights in a step: after backward, or each as soon as its gradient is there."""

import collections
import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from torchembed.autograd.gradient_slots import slot_of
from torchembed.autograd.reads import ReadsOf
from torchembed.autograd.weight_gradients import Completion, DeferredWeightGradients
from torchembed.step.step_optimizers import skipping, update
from torchembed.step.streams import event_on, fork_and_join, join, wait_for

_NOTHING = contextlib.nullcontext()
_MIN_ELEMENTS = 1 << 16
"""The least size of a weight that is worth an update kernel of its own."""


@runtime_checkable
class EarlyOptimizer(Protocol):
    """An optimizer of dense parameters that can update some of them before its step."""

    param_groups: list[dict[str, Any]]
    skip: Tensor | None
    """float32 ``[1]``; nothing is updated where it is not zero on the device."""

    @property
    def may_step_early(self) -> bool:
        """False where something must see all gradients before the first update."""
        ...

    def step_early(self, parameters: Collection[Tensor]) -> None:
        """Update those of ``parameters`` that it has, whose gradients are final; its step then
        leaves them out."""
        ...


class DenseUpdates(Protocol):
    """The part of a step that updates its dense weights."""

    def around_backward(self, skip: Tensor | None) -> contextlib.AbstractContextManager[object]:
        """A context for backward, at whose end all gradients are there. What is updated before that
        does not change where ``skip`` is not zero."""
        ...

    def update(self, skip: Tensor | None) -> None:
        """The optimizers' step after backward, which changes nothing where ``skip`` is not zero and
        leaves out what was updated before. The current stream waits for it at the end."""
        ...


class PlainUpdates:
    """The steps of dense optimizers after backward, no gradient deferred: of eager steps.

    Args:
        optimizers: torchembed's and torch's.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)

    def around_backward(self, skip: Tensor | None) -> contextlib.AbstractContextManager[object]:
        del skip  # nothing is updated before
        return _NOTHING

    def update(self, skip: Tensor | None) -> None:
        update(self._optimizers, skip)


class LateUpdates(PlainUpdates):
    """The steps of dense optimizers after backward, which leaves gradients of weights to its end.

    Args:
        optimizers: those that can update early (:class:`EarlyOptimizer`), and others.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__(optimizers)
        self._can_be_early = [o for o in optimizers if isinstance(o, EarlyOptimizer)]

    def around_backward(self, skip: Tensor | None) -> contextlib.AbstractContextManager[object]:
        del skip  # nothing is updated before
        return DeferredWeightGradients()

    def _early(self) -> list[EarlyOptimizer]:
        """Optimizers that may update early now."""
        return [optimizer for optimizer in self._can_be_early if optimizer.may_step_early]


class EarlyUpdates(LateUpdates):
    """Optimizers begin to update while backward goes on to earlier layers.

    Each gradient of a weight that a layer defers is computed on a stream of its own, as soon as
    backward has come by the layer. The weight is updated, on another stream, as soon as its
    gradient is there, unless something reads it later in the same backward. Where weights have
    several gradients to be added up, all are computed and updated after backward; the first
    backward shows whether they have.

    For steps that become a graph, where what waits for what matters and not when it was launched;
    and for one rank, since what becomes of gradients between ranks is not known here.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
        super().__init__(optimizers)
        self._are_alone: bool | None = None
        """True if no deferred weight has two gradients to add up; None before the first step."""
        self._ready: dict[Tensor, torch.cuda.Event] = {}
        """For each weight that backward no longer reads, an event recorded once that is so."""
        # Gradients before updates, which wait for them, and both before what has no priority.
        self._gradients_stream = torch.cuda.Stream(device, priority=-2)
        self._updates_stream = torch.cuda.Stream(device, priority=-1)

    @contextlib.contextmanager
    def around_backward(self, skip: Tensor | None) -> Iterator[None]:
        del skip  # no update is launched before `update`
        stream = self._gradients_stream if self._are_alone else None
        weights: list[Tensor] = []
        computed: dict[Tensor, torch.cuda.Event] = {}

        def note(weight: Tensor) -> None:
            # The engine calls once more for a gradient that the stream has computed.
            if weight not in computed:
                computed[weight] = torch.cuda.Event()
                computed[weight].record()

        hooks = [w.register_post_accumulate_grad_hook(note) for w in self._candidates()]
        try:
            with DeferredWeightGradients(stream) as deferred, ReadsOf(deferred.weights) as reads:
                yield
                weights += deferred.weights
                # A gradient that another one is added to is final only at the end of backward.
                if self._are_alone is None:
                    counts = collections.Counter(map(id, weights))
                    self._are_alone = all(counts[id(w)] == 1 and w.grad is None for w in weights)
        finally:
            for hook in hooks:
                hook.remove()
        self._ready = {}
        if stream is not None:
            # A weight that backward reads again, as tied layers do, must keep its value until then.
            may_change = [w for w in weights if w in computed and id(w) not in reads.found]
            self._ready = {weight: computed[weight] for weight in may_change}

    @property
    def num_early(self) -> int:
        """Number of weights that the last step could update while backward went on."""
        return len(self._ready)

    def _candidates(self) -> list[Tensor]:
        """Large weights, of optimizers and with gradients that nobody else has to do with."""
        parameters = [
            parameter
            for optimizer in self._early()
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and parameter.numel() >= _MIN_ELEMENTS
        ]
        # One hook is the slot's own.
        return [p for p in parameters if len(p._post_accumulate_grad_hooks or {}) <= 1]

    def update(self, skip: Tensor | None) -> None:
        begun: dict[int, torch.cuda.Event | None] = {}
        for weight, ready in self._ready.items():
            slot = slot_of(weight)
            # A gradient in other memory is left to the step below, which copies it to the flat
            # buffer.
            if slot is None or not slot.holds(weight.grad):
                continue
            self._updates_stream.wait_event(ready)
            with torch.cuda.stream(self._updates_stream):
                for optimizer in self._early():
                    with skipping(optimizer, skip):
                        optimizer.step_early([weight])
            # The first update in a flat buffer counts its step.
            buffer = slot.memory.untyped_storage().data_ptr()
            if buffer not in begun:
                begun[buffer] = event_on(self._updates_stream)
        for event in begun.values():
            wait_for(event)
        for optimizer in self._early():
            # The weights that are left, concurrently with the early ones.
            with skipping(optimizer, skip):
                optimizer.step_early([p for g in optimizer.param_groups for p in g["params"]])
        if begun:
            join(self._updates_stream)
        # Hooks see all of it.
        super().update(skip)


class UpdatesOfMeans(LateUpdates):
    """On several ranks, optimizers update each weight as soon as its mean is there, and backward
    done but for deferred gradients that do not read the weight.

    Args:
        stream: where all updates are.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], stream: torch.cuda.Stream
    ) -> None:
        super().__init__(optimizers)
        self._stream = stream

    @contextlib.contextmanager
    def around_backward(self, skip: Tensor | None) -> Iterator[None]:
        early = self._early()

        def note(parameters: Sequence[Tensor]) -> None:
            for optimizer in early:
                with skipping(optimizer, skip):
                    optimizer.step_early(parameters)

        changed = [p for o in early for group in o.param_groups for p in group["params"]]
        with DeferredWeightGradients(completion=Completion(self._stream, note, changed)):
            yield

    def update(self, skip: Tensor | None) -> None:
        with fork_and_join(self._stream):
            super().update(skip)
