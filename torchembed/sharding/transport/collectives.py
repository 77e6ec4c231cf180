"""Exchanging tensors between ranks, forward and backward."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchembed.sharding.transport.finished_work import wait_for
from torchembed.sharding.transport.narrowing import float16_scale, narrowed
from torchembed.sharding.wire import WirePrecision


def exchange(
    tensor: Tensor,
    send: list[int],
    receive: list[int],
    group: Any,
    *,
    in_backward: bool = False,
) -> Tensor:
    """All-to-all along dim 0: ``send[r]`` rows go to rank r, ``receive[r]`` rows come from it."""
    received = tensor.new_empty(sum(receive), *tensor.shape[1:])
    tensor = tensor.contiguous()
    keeps_work = in_backward and not tensor.is_cuda
    work = dist.all_to_all_single(received, tensor, receive, send, group=group, async_op=keeps_work)
    wait_for(work)
    return received


def exchange_sizes(sizes: Tensor, group: Any) -> list[list[int]]:
    """All-to-all of host integers: row r of ``sizes [W, n]`` goes to rank r.

    ``sizes`` is on the CPU, so that no GPU is waited for. Returns a row from each rank.
    """
    received = torch.empty_like(sizes)
    dist.all_to_all_single(received, sizes, group=group)
    return received.tolist()


def gather_size(size: int, group: Any) -> list[int]:
    """``size`` of every rank, through the CPU unless within :func:`known_sizes`."""
    return [of_rank for (of_rank,) in gather_numbers((size,), group)]


def gather_numbers(numbers: Sequence[int], group: Any) -> list[list[int]]:
    """The 64-bit integers ``numbers`` of every rank, as many on each, by rank; through the CPU
    unless within :func:`known_sizes`."""
    return _gathering.get()(tuple(numbers), group)


def _ask(numbers: tuple[int, ...], group: Any) -> list[list[int]]:
    mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    of_ranks = mine.new_empty(dist.get_world_size(group), len(numbers))
    dist.all_gather(list(of_ranks), mine, group=group)
    return of_ranks.tolist()


_Gather = Callable[[tuple[int, ...], Any], list[list[int]]]

_gathering: ContextVar[_Gather] = ContextVar("gathering", default=_ask)


class GatheredSize(NamedTuple):
    """What :func:`gather_size` or :func:`gather_numbers` was asked, and gave."""

    own: tuple[int, ...]
    of_ranks: list[list[int]]


@contextlib.contextmanager
def noted_sizes() -> Iterator[list[GatheredSize]]:
    """What :func:`gather_size` and :func:`gather_numbers` give meanwhile in this thread, in its
    order."""
    noted: list[GatheredSize] = []

    def ask(numbers: tuple[int, ...], group: Any) -> list[list[int]]:
        noted.append(GatheredSize(numbers, _ask(numbers, group)))
        return noted[-1].of_ranks

    with _gathering_by(ask):
        yield noted


@contextlib.contextmanager
def known_sizes(noted: Sequence[GatheredSize]) -> Iterator[None]:
    """Meanwhile :func:`gather_size` and :func:`gather_numbers` give in this thread what was
    ``noted``, and no rank waits for another one; for what asks for the same sizes in the same
    order, on every rank.

    Raises:
        RuntimeError: in these functions, where they are asked for others.
    """
    left = iter(noted)

    def give(numbers: tuple[int, ...], group: Any) -> list[list[int]]:
        known = next(left, None)
        if known is None or known.own != numbers:
            there = "none is left" if known is None else f"{_listed(known.own)} comes next"
            raise RuntimeError(
                f"sizes must be asked for as before, got {_listed(numbers)}, where {there}"
            )
        return known.of_ranks

    with _gathering_by(give):
        yield


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


@contextlib.contextmanager
def _gathering_by(gather: _Gather) -> Iterator[None]:
    before = _gathering.set(gather)
    try:
        yield
    finally:
        _gathering.reset(before)


class _DifferentiableExchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        send: list[int],
        receive: list[int],
        group: Any,
        gradient_scale: float,
        wire: WirePrecision,
    ) -> Tensor:
        ctx.send, ctx.receive, ctx.group, ctx.scale = send, receive, group, gradient_scale
        ctx.wire = wire.backward
        return exchange(narrowed(tensor, wire.forward), send, receive, group).to(tensor.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grad = grad * ctx.scale
        dtype, inverse = grad.dtype, None
        if ctx.wire is torch.float16 and dtype is torch.float32:
            scale, inverse = float16_scale(grad, ctx.group)
            grad = grad * scale
        sent = narrowed(grad, ctx.wire)
        grad = exchange(sent, ctx.receive, ctx.send, ctx.group, in_backward=True).to(dtype)
        return grad if inverse is None else grad * inverse, *[None] * 5


def differentiable_exchange(
    tensor: Tensor,
    send: list[int],
    receive: list[int],
    group: Any,
    gradient_scale: float,
    wire: WirePrecision,
) -> Tensor:
    """:func:`exchange` whose backward sends gradients the other way, times ``gradient_scale``.

    Both travel in the precision that ``wire`` says and arrive in their own dtype.
    Where gradients are enabled the result requires one on every rank, so that all ranks take part
    in backward even where one has nothing to train.
    """
    if torch.is_grad_enabled() and not tensor.requires_grad:
        tensor = tensor.detach().requires_grad_()
    return _DifferentiableExchange.apply(tensor, send, receive, group, gradient_scale, wire)
