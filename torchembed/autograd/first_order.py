"""Backward passes that are computed by kernels, and so cannot be differentiated themselves."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def first_order(layer: str, instead: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For ``backward`` of an ``autograd.Function``: where its result is differentiated once more,
    as after ``create_graph=True``, an error says that ``layer`` cannot, and what can be used
    ``instead``. As torch's ``once_differentiable`` otherwise."""
    message = (
        f"{layer} has no second derivative, and one was asked for (create_graph=True, a gradient "
        f"penalty, or a Hessian); use {instead} there"
    )

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def once(ctx: Any, *grads: Tensor | None) -> Any:
            with torch.no_grad():
                results = backward(ctx, *grads)
            is_differentiated = torch.is_grad_enabled() and any(
                grad is not None and grad.requires_grad for grad in grads
            )
            if not is_differentiated:
                return results
            parts = results if isinstance(results, tuple) else (results,)
            source = next(grad for grad in grads if grad is not None and grad.requires_grad)
            return tuple(
                _Refusal.apply(part, source, message) if isinstance(part, Tensor) else part
                for part in parts
            )

        return once

    return decorate


class _Refusal(torch.autograd.Function):
    """A gradient as it is, whose own gradient is an error."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, source: Tensor, message: str) -> Tensor:
        ctx.message = message
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError(ctx.message)
