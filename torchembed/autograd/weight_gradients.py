"""Gradients of weights in backward: into their slots, and later or on another stream if asked."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from torchembed.autograd.gradient_slots import slot_of
from torchembed.autograd.reads import ReadsOf

Compute = Callable[[Tensor | None], Tensor]
"""Computes a gradient: into the given tensor, or into a new one where that is None."""


class Completion(NamedTuple):
    """What becomes of gradients that are on their way over ranks, once backward is done but for
    deferred gradients that do not read what is changed."""

    stream: "torch.cuda.Stream"
    """Waits for backward, and for them."""
    note: Callable[[Sequence[Tensor]], None]
    """Called on the stream with parameters whose gradients are there, and will not change."""
    changed: Sequence[Tensor]
    """What it may change."""


class DeferredWeightGradients:
    """Lets backward compute the gradients of inputs first, and those of weights after them.

    Within it, torchembed's linear and cross layers leave the gradients of their weights for later,
    and the last part of sums over samples for biases, so that what waits for the gradients of
    embeddings (wires, row updates) can run beside them::

        with DeferredWeightGradients() as deferred:
            loss.backward()          # gradients of inputs, and of other modules' weights
            ...                      # start on another stream what waits for those
        # every weight.grad is there

    With a ``stream``, each gradient is computed there as soon as backward comes by its layer, and
    on leaving the current stream waits for it; without one, on leaving or in :meth:`run`, on the
    current stream, and where layers share a weight its gradients are added up. Both can be captured
    in a CUDA graph. Hooks of ``register_post_accumulate_grad_hook`` run when the gradient is there,
    and torch may have run them before; those of ``register_hook`` see nothing.
    ``torch.autograd.grad`` gives no gradients of weights meanwhile. Of a model that is trained on
    several ranks use one for each backward, since other gradients are averaged within it already.

    Args:
        stream: a CUDA stream.
        completion: for gradients that are averaged over ranks, which the current stream waits for
            where it is None.

    Raises:
        RuntimeError: on entering, where another one is entered.
    """

    def __init__(
        self, stream: "torch.cuda.Stream | None" = None, completion: Completion | None = None
    ) -> None:
        self.stream, self.completion = stream, completion
        self.weights: list[Tensor] = []
        """Of the gradients deferred so far, in their order."""
        self._waiting: list[tuple[Tensor, Compute]] = []
        self._held: list[Compute] = []
        """What the stream reads; freed where the current stream has waited for it."""
        self._seen: set[int] = set()
        self._completions: list[Callable[[], None]] = []
        self._uses_stream = False
        self._backward_done: torch.cuda.Event | None = None
        self._late_reads: set[int] = set()
        """Of what the completion may change, what gradients were computed from after that."""

    def __enter__(self) -> Self:
        if _entered:
            raise RuntimeError(
                "gradients of weights are deferred already; leave the other "
                "DeferredWeightGradients first"
            )
        _entered.append(self)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            if error is None:
                self.run()
        finally:
            # Before what is held there is freed, where backward failed too.
            self._wait()
            self._waiting.clear()
            self._held.clear()
            self._seen.clear()
            self._completions.clear()
            self.weights.clear()
            self._late_reads.clear()
            self._backward_done = None
            self._uses_stream = False
            _entered.clear()

    @torch.no_grad()
    def run(self) -> None:
        """Compute what waits, and let the current stream wait for what runs on another one."""
        with self._noting_late_reads():
            while self._waiting:
                _accumulate(*self._waiting.pop(0))
        for complete in self._completions:
            complete()
        self._completions.clear()
        self._wait()
        self._held.clear()

    @contextlib.contextmanager
    def _noting_late_reads(self) -> Iterator[None]:
        if self.completion is None:
            yield
            return
        self._backward_done = torch.cuda.Event()
        self._backward_done.record()
        with ReadsOf(self.completion.changed) as reads:
            yield
        self._late_reads = reads.found

    def _wait(self) -> None:
        """Let the current stream wait for the other one, which a capture may not know yet."""
        if self.stream is not None and self._uses_stream:
            torch.cuda.current_stream().wait_stream(self.stream)

    def _defer(self, weight: Tensor, compute: Compute) -> None:
        self.weights.append(weight)
        if self.stream is None:
            self._waiting.append((weight, compute))
            return
        if id(weight) in self._seen:
            raise RuntimeError(
                f"a weight of shape {tuple(weight.shape)} has two gradients within one "
                "DeferredWeightGradients with a stream, which adds none up; use it for one "
                "backward, and not for layers that share weights, or leave the stream out"
            )
        self._seen.add(id(weight))
        self._held.append(compute)
        with on_gradient_stream():
            _accumulate(weight, compute)


_entered: list[DeferredWeightGradients] = []
"""None or one. Backward runs on threads of the engine, so this is no context variable."""


def are_deferred() -> bool:
    """Whether gradients of weights are deferred now."""
    return bool(_entered) and not torch.compiler.is_compiling()


def keep_parameters(ctx: Any, *parameters: Tensor | None) -> None:
    """In ``forward``: let ``ctx.parameters`` be those of ``parameters`` that are leaves, and None
    in the place of others.

    What ``backward`` finds among saved tensors may be another tensor, where hooks have saved them
    (activation checkpointing, ``save_on_cpu``): with the same numbers, but nobody's parameter.
    """
    leaves = [None if p is None or not p.is_leaf else p for p in parameters]
    ctx.parameters = [None] * len(leaves) if torch.compiler.is_compiling() else leaves


def weight_gradient(weight: Tensor | None, compute: Compute) -> Tensor | None:
    """What ``backward`` of an ``autograd.Function`` returns for ``weight``.

    That is ``compute``'s result, in the slot of the weight's gradient where it has one; or None,
    where the gradient is deferred.

    Args:
        weight: as :func:`keep_parameters` kept it; None where it is no parameter.
    """
    if weight is None:
        return compute(None)
    if _entered:
        _entered[0]._defer(weight, compute)
        return None
    slot = slot_of(weight)
    return compute(None if slot is None else slot.claim(weight))


def product_gradient(weight: Tensor | None, grad: Tensor, x: Tensor) -> Tensor | None:
    """:func:`weight_gradient` of the product ``x @ weight.T``: ``grad.T @ x``."""
    return weight_gradient(weight, lambda out: torch.mm(grad.t(), x, out=out))


def gradient_memory(saved: Tensor, parameter: Tensor | None) -> Tensor:
    """Where ``backward`` may write the gradient of ``parameter`` that it then returns: its slot, or
    new memory, like ``saved``.

    Args:
        parameter: as :func:`keep_parameters` kept it.
    """
    slot = None if parameter is None else slot_of(parameter)
    memory = None if slot is None or parameter is None else slot.claim(parameter)
    return torch.empty_like(saved) if memory is None else memory


def _accumulate(weight: Tensor, compute: Compute) -> None:
    """What the engine does with a leaf's gradient."""
    slot = slot_of(weight)
    grad = compute(None if slot is None else slot.claim(weight))
    if weight.grad is None:
        weight.grad = grad
    else:
        weight.grad += grad
    for hook in list((weight._post_accumulate_grad_hooks or {}).values()):
        hook(weight)


def is_waiting(weight: Tensor) -> bool:
    """Whether a gradient of ``weight`` is still to be computed."""
    return any(weight is other for entered in _entered for other, _ in entered._waiting)


def are_waiting() -> bool:
    """Whether gradients of weights are still to be computed, beside what comes before them now."""
    return any(entered._waiting for entered in _entered)


@contextlib.contextmanager
def on_gradient_stream() -> Iterator[None]:
    """Work within comes after all gradients computed so far, on whatever stream they were."""
    stream = _entered[0].stream if _entered else None
    if stream is None:
        yield
        return
    _entered[0]._uses_stream = True
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


@contextlib.contextmanager
def completing(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Work within makes the gradients of ``parameters`` what they will be. It is on the stream of
    the completion, if there is one, after backward and what reads the parameters then; there
    :attr:`Completion.note` is called."""
    completion = _entered[0].completion if _entered else None
    if completion is None:
        yield
        return
    done = _entered[0]._backward_done
    assert done is not None  # gradients complete in `run`, which begins with it
    if any(id(p) in _entered[0]._late_reads for p in parameters):
        completion.stream.wait_stream(torch.cuda.current_stream())
    else:
        completion.stream.wait_event(done)
    with torch.cuda.stream(completion.stream):
        yield
        completion.note(parameters)


def when_gradients_are_complete(callback: Callable[[], None]) -> None:
    """Run ``callback`` at the end of the backward that calls this, deferred gradients included."""
    if _entered:
        _entered[0]._completions.append(callback)
    else:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
