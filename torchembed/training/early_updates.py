"""Dense weights that are updated as soon as their gradients are there, while backward goes on."""

import collections
import os
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchembed.core.gradient_slots import slot_of
from torchembed.core.trees import tensors_in
from torchembed.ops.weight_gradients import DeferredWeightGradients
from torchembed.optim import DenseOptimizer
from torchembed.training.guarded_update import skipping, step_unless

_MIN_ELEMENTS = 1 << 16
"""Of a weight that is worth a kernel of its own."""


class EarlyUpdates:
    """Updates weights of linear and cross layers while backward goes on to the layers before.

    A weight may change once its gradient is complete and nothing reads it any more. Which do, one
    observed backward shows: of a weight with one gradient, that a layer deferred, and no read after
    that. From then on each gradient of a weight is computed on a stream of its own, as soon as
    backward has come by its layer, and each update on another one. Where a layer's weight has
    several gradients, all stay as they are: computed and updated after backward.

    For a captured step of one rank: what happens to gradients between ranks is not known here.
    """

    def __init__(self, optimizers: Sequence[DenseOptimizer], device: torch.device) -> None:
        self._optimizers = list(optimizers)
        self._weights: list[Tensor] | None = None
        """Those updated early; None until they are known."""
        self._are_alone = False
        """Whether no two gradients of a deferred weight are to be added up."""
        self._ready: dict[Tensor, torch.cuda.Event] = {}
        prio = [int(x) for x in os.environ.get("TE_EPRIO", "0,0").split(",")]
        self._gradients_stream = torch.cuda.Stream(device, priority=prio[0])
        self._updates_stream = torch.cuda.Stream(device, priority=prio[1])

    @contextlib.contextmanager
    def around_backward(self) -> Iterator[None]:
        """Gradients of weights are deferred meanwhile, and there at the end."""
        if self._weights is None:
            with DeferredWeightGradients() as deferred, _Reads(deferred) as reads:
                yield
                self._learn(deferred.weights, reads)
            return
        stream = self._gradients_stream if self._are_alone else None
        self._ready.clear()
        hooks = [w.register_post_accumulate_grad_hook(self._note) for w in self._weights]
        try:
            with DeferredWeightGradients(stream):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _learn(self, deferred: list[Tensor], reads: "_Reads") -> None:
        counts = collections.Counter(map(id, deferred))
        self._are_alone = all(counts[id(w)] == 1 and w.grad is None for w in deferred)
        updated = {id(p) for o in self._optimizers for g in o.param_groups for p in g["params"]}
        self._weights = [
            weight
            for weight in deferred
            if self._are_alone
            and id(weight) in updated
            and id(weight) not in reads.after_deferral
            and weight.numel() >= _MIN_ELEMENTS
        ]

    def _note(self, weight: Tensor) -> None:
        # The engine calls once more for a gradient that the stream has computed.
        if weight not in self._ready:
            self._ready[weight] = torch.cuda.Event()
            self._ready[weight].record()

    def update(self, skip: Tensor | None) -> None:
        """The optimizers' step, of which the early updates may begin while backward runs and the
        others come now; the current stream waits for it in :meth:`join`, and must allocate nothing
        before that."""
        for weight, ready in self._ready.items():
            slot = slot_of(weight)
            if slot is None or not slot.holds(weight.grad):
                continue
            self._updates_stream.wait_event(ready)
            with torch.cuda.stream(self._updates_stream):
                for optimizer in self._optimizers:
                    with skipping(optimizer, skip):
                        optimizer.step_early([weight])

        self._updates_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._updates_stream):
            for optimizer in self._optimizers:
                step_unless(optimizer, skip)

    def join(self) -> None:
        """Let the current stream wait for the updates."""
        torch.cuda.current_stream().wait_stream(self._updates_stream)


class _Reads(TorchDispatchMode):
    """Which weights operations are given after their gradients were deferred."""

    def __init__(self, deferred: DeferredWeightGradients) -> None:
        super().__init__()
        self._deferred = deferred
        self.after_deferral: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = [t for t in tensors_in((args, kwargs or {})) if t.is_cuda]
        for weight in self._deferred.weights:
            first = weight.data_ptr()
            last = first + weight.numel() * weight.element_size()
            for tensor in given:
                if first <= tensor.data_ptr() < last:
                    self.after_deferral.add(id(weight))
        return func(*args, **(kwargs or {}))
