"""Backward passes that are computed by kernels, and how they are differentiated themselves: by
operations of their own, or not, with an error that says so."""

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from torchembed.core.function_context import FunctionContext

Backward: TypeAlias = Callable[..., Any]
"""Takes an ``autograd.Function``'s context and the gradients of its results; returns those of its
arguments, one or a tuple."""


def creates_graph() -> bool:
    """True in a backward that may be differentiated itself, as with ``create_graph=True``."""
    # Compilers trace backward with gradients enabled and differentiate none of it.
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def first_order(layer: str, instead: str) -> Callable[[Backward], Backward]:
    """Decorator of ``backward`` of an ``autograd.Function`` that has no second derivative.

    Like torch's ``once_differentiable``, but the error says that ``layer`` cannot be differentiated
    twice, as after ``create_graph=True``, and names what can be used ``instead``.
    """
    message = no_second_derivative(layer, instead)

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def once(ctx: FunctionContext, *grads: Tensor | None) -> Any:
            with torch.no_grad():
                results = backward(ctx, *grads)
            is_differentiated = torch.is_grad_enabled() and any(
                grad is not None and grad.requires_grad for grad in grads
            )
            if not is_differentiated:
                return results
            # Refused when the second backward comes and not here: create_graph=True alone asks for
            # a graph that many callers never go back through.
            parts = results if isinstance(results, tuple) else (results,)
            source = next(grad for grad in grads if grad is not None and grad.requires_grad)
            return tuple(
                refusing(part, source, message) if isinstance(part, Tensor) else part
                for part in parts
            )

        return once

    return decorate


def no_second_derivative(layer: str, instead: str) -> str:
    """The message of the error where ``layer`` is differentiated twice."""
    return (
        f"{layer} has no second derivative, and one was asked for (create_graph=True, a gradient "
        f"penalty, or a Hessian); use {instead} there"
    )


def refusing(gradient: Tensor, source: Tensor, message: str) -> Tensor:
    """``gradient``, as one that depends on ``source``: a ``RuntimeError`` with ``message`` comes
    where a backward goes through it."""
    return _Refusal.apply(gradient, source, message)


class _Refusal(torch.autograd.Function):
    """Identity of a gradient, whose own backward is an error."""

    @staticmethod
    def forward(ctx: FunctionContext, gradient: Tensor, source: Tensor, message: str) -> Tensor:
        ctx.message = message
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor) -> NoReturn:
        raise RuntimeError(ctx.message)
