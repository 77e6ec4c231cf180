"""Gradients of weights in backward: into their slots, and later or on another stream if asked."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from torchembed.autograd.gradient_slots import slot_of
from torchembed.autograd.reads import ReadsOf
from torchembed.core.function_context import FunctionContext

Compute = Callable[[Tensor | None], Tensor]
"""Function that computes a gradient, into the given tensor or, where that is None, a new one."""


class Completion(NamedTuple):
    """Early use of gradients that are averaged over ranks, such as updating their parameters.

    It begins once backward is done but for deferred gradients that do not read ``changed``.
    """

    stream: "torch.cuda.Stream"
    """Stream of the early use, which waits for backward and for the averages."""
    note: Callable[[Sequence[Tensor]], None]
    """Called on the stream with parameters whose gradients are final."""
    changed: Sequence[Tensor]
    """Tensors that the early use may change."""


class Parameter(NamedTuple):
    """A parameter of a layer, as the layer's backward knows it."""

    leaf: Tensor | None
    """The parameter itself; None where it was computed from others, or while torch compiles."""
    dtype: torch.dtype
    """Its own, in which its gradient is wanted; autocast computes with a copy in another one."""


class DeferredWeightGradients:
    """Lets backward compute the gradients of inputs first, and those of weights after them.

    Within it, torchembed's linear and cross layers leave the gradients of their weights for later,
    and the last part of sums over samples for biases. Work that waits for the gradients of
    embeddings (exchanges, row updates) can then run on another stream at the same time::

        with DeferredWeightGradients() as deferred:
            loss.backward()          # gradients of inputs, and of other modules' weights
            ...                      # launch the work that waits for those on another stream
        # every weight.grad is there

    With a ``stream``, each gradient is computed there as soon as backward passes its layer, and the
    current stream waits for it on leaving. Without one, gradients are computed on leaving or in
    :meth:`run`, on the current stream, and those of a weight that layers share are added up. Both
    can be captured in a CUDA graph. Hooks of ``register_post_accumulate_grad_hook`` run when the
    gradient is there, and torch may have run them before. A weight with a hook of
    ``register_hook`` is left out, so that the hook sees its gradient.
    ``torch.autograd.grad`` gives no gradients of weights within it. For a model that is trained on
    several ranks use one for each backward, since other gradients are averaged within it already.

    Args:
        stream: a CUDA stream.
        completion: early use of gradients that are averaged over ranks; the current stream waits
            for these where it is None.

    Raises:
        RuntimeError: on entering, where another one is entered.
    """

    def __init__(
        self, stream: "torch.cuda.Stream | None" = None, completion: Completion | None = None
    ) -> None:
        self.stream, self.completion = stream, completion
        self.weights: list[Tensor] = []
        """Weights whose gradients were deferred so far, in that order."""
        self._waiting: list[tuple[Tensor, Compute]] = []
        self._held: list[Compute] = []
        """Functions that hold the tensors which the other stream reads: kept until the current
        stream has waited for it, since the allocator does not know of that stream."""
        self._seen: set[int] = set()
        self._completions: list[Callable[[], None]] = []
        self._uses_stream = False
        self._backward_done: torch.cuda.Event | None = None
        self._late_reads: set[int] = set()
        """``id`` of tensors that the completion may change and that gradients were computed from
        after backward: their changes must wait for those gradients."""

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
            # Also where backward failed: the other stream may still read the tensors that are freed
            # below.
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
        """Compute the deferred gradients, and let the current stream wait for those that run on
        another one."""
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
        """Let the current stream wait for the other one, if that was used: waiting for a stream
        that no capture has forked to is an error in one."""
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
"""The entered context, if any. No context variable, since backward runs on the engine's threads."""


def are_deferred() -> bool:
    """True while gradients of weights are deferred."""
    return bool(_entered) and not torch.compiler.is_compiling()


def keep_parameters(ctx: FunctionContext, *parameters: Tensor | None) -> None:
    """Keep in ``ctx.parameters`` a :class:`Parameter` for each of ``parameters``.

    For ``forward``. Saved tensors will not do: where hooks save them (activation checkpointing,
    ``save_on_cpu``), ``backward`` gets copies, which are nobody's parameter.
    """
    has_leaves = not torch.compiler.is_compiling()
    ctx.parameters = [
        None if p is None else Parameter(p if has_leaves and p.is_leaf else None, p.dtype)
        for p in parameters
    ]


def weight_gradient(weight: Parameter, compute: Compute) -> Tensor | None:
    """Gradient of ``weight`` for ``backward`` of an ``autograd.Function`` to return.

    That is ``compute``'s result, in the slot of the weight's gradient where it has one; or None
    where the gradient is deferred.
    """
    leaf = weight.leaf
    # Hooks on a gradient may change it, and are called for what backward returns only.
    if leaf is None or not _entered or leaf._backward_hooks:
        return compute(_claimed_memory(leaf))
    _entered[0]._defer(leaf, compute)
    return None


def product_gradient(weight: Parameter, grad: Tensor, x: Tensor) -> Tensor | None:
    """:func:`weight_gradient` for the product ``x @ weight.T``: ``grad.T @ x``, in the dtype of the
    parameter, which under autocast may be another than that of ``x``."""
    return weight_gradient(weight, functools.partial(_product, grad.t(), x, weight.dtype))


def _product(left: Tensor, right: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    if dtype is left.dtype:
        return torch.mm(left, right, out=out)
    if left.is_cuda and left.dtype.itemsize == 2 and dtype is torch.float32:
        return torch.mm(left, right, dtype, out=out)  # the sums as they are, not rounded first
    product = torch.mm(left, right)
    return product.to(dtype) if out is None else out.copy_(product)


def gradient_memory(saved: Tensor, parameter: Parameter) -> Tensor:
    """Memory for the gradient of ``parameter`` that ``backward`` writes and returns: the slot of
    its gradient, or new memory of its dtype, shaped as ``saved``."""
    memory = _claimed_memory(parameter.leaf)
    return torch.empty_like(saved, dtype=parameter.dtype) if memory is None else memory


def _claimed_memory(leaf: Tensor | None) -> Tensor | None:
    """The slot of the gradient of ``leaf``, claimed; None where it has none."""
    if leaf is None:
        return None
    slot = slot_of(leaf)
    return None if slot is None else slot.claim(leaf)


def _accumulate(weight: Tensor, compute: Compute) -> None:
    """Compute the gradient of ``weight`` and accumulate it, as the engine does for a leaf."""
    grad = compute(_claimed_memory(weight))
    if weight.grad is None:
        weight.grad = grad
    else:
        weight.grad += grad
    for hook in list((weight._post_accumulate_grad_hooks or {}).values()):
        hook(weight)


def is_waiting(weight: Tensor) -> bool:
    """True where a gradient of ``weight`` is still to be computed."""
    return any(weight is other for entered in _entered for other, _ in entered._waiting)


def are_waiting() -> bool:
    """True where gradients of weights are still to be computed."""
    return any(entered._waiting for entered in _entered)


@contextlib.contextmanager
def on_gradient_stream() -> Iterator[None]:
    """Context whose work is ordered after all gradients computed so far, on the stream of deferred
    gradients where there is one."""
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
    """Context whose work makes the gradients of ``parameters`` final.

    With a completion, the work is on its stream, ordered after backward and after deferred
    gradients that read the parameters, and :attr:`Completion.note` is called there at the end.
    """
    completion = _entered[0].completion if _entered else None
    if completion is None:
        yield
        return
    done = _entered[0]._backward_done
    assert done is not None  # gradients complete in `run`, which begins with it
    # A parameter that a deferred gradient reads may not change before that is computed; for others
    # it is enough that backward is done.
    if any(id(p) in _entered[0]._late_reads for p in parameters):
        completion.stream.wait_stream(torch.cuda.current_stream())
    else:
        completion.stream.wait_event(done)
    with torch.cuda.stream(completion.stream):
        yield
        completion.note(parameters)


def when_gradients_are_complete(callback: Callable[[], None]) -> None:
    """Run ``callback`` at the end of the current backward, after deferred gradients."""
    if _entered:
        _entered[0]._completions.append(callback)
    else:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
