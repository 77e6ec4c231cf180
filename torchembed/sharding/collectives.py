"""Exchanging tensors between ranks, forward and backward."""

import collections
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

_finished: collections.deque[dist.Work] = collections.deque(maxlen=8)
"""A thread of gloo's lets go of a finished collective in its own time. From backward, that may free
a Python object, which ends the process where Python is shutting down by then. So the last few are
kept until the main thread frees them."""


def _wait(work: dist.Work | None) -> None:
    """Wait for a collective on the CPU; on a GPU there is none, since its stream waits."""
    if work is not None:
        work.wait()
        _finished.append(work)


def all_reduce(tensor: Tensor, group: Any) -> None:
    """Make ``tensor`` the sum over ranks, in place."""
    _wait(dist.all_reduce(tensor, group=group, async_op=not tensor.is_cuda))


def exchange(tensor: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
    """All-to-all along dim 0: ``send[r]`` rows go to rank r, ``receive[r]`` rows come from it."""
    received = tensor.new_empty(sum(receive), *tensor.shape[1:])
    tensor = tensor.contiguous()
    is_waited_for = not tensor.is_cuda
    _wait(
        dist.all_to_all_single(received, tensor, receive, send, group=group, async_op=is_waited_for)
    )
    return received


def exchange_sizes(sizes: Tensor, group: Any) -> list[list[int]]:
    """All-to-all of host integers: row r of ``sizes [W, n]`` goes to rank r.

    ``sizes`` is on the CPU, so that no GPU is waited for. Returns a row from each rank.
    """
    received = torch.empty_like(sizes)
    dist.all_to_all_single(received, sizes, group=group)
    return received.tolist()


def gather_size(size: int, group: Any) -> list[int]:
    """``size`` of every rank."""
    sizes = list(torch.empty(dist.get_world_size(group), 1, dtype=torch.int64))
    dist.all_gather(sizes, torch.tensor([size]), group=group)
    return torch.cat(sizes).tolist()


class _DifferentiableExchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        send: list[int],
        receive: list[int],
        group: Any,
        gradient_scale: float,
    ) -> Tensor:
        ctx.send, ctx.receive, ctx.group, ctx.scale = send, receive, group, gradient_scale
        return exchange(tensor, send, receive, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grad = exchange(grad * ctx.scale, ctx.receive, ctx.send, ctx.group)
        return grad, None, None, None, None


def differentiable_exchange(
    tensor: Tensor, send: list[int], receive: list[int], group: Any, gradient_scale: float
) -> Tensor:
    """:func:`exchange` whose backward sends gradients the other way, times ``gradient_scale``.

    Where gradients are enabled the result requires one on every rank, so that all ranks take part
    in backward even where one has nothing to train.
    """
    if torch.is_grad_enabled() and not tensor.requires_grad:
        tensor = tensor.detach().requires_grad_()
    return _DifferentiableExchange.apply(tensor, send, receive, group, gradient_scale)
