"""All-to-alls of tensors between ranks, forward and backward, and gathers of host integers."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchembed.core.function_context import FunctionContext
from torchembed.sharding.transport.finished_work import wait_for
from torchembed.sharding.transport.narrowing import float16_scale
from torchembed.sharding.transport.sent_lines import SentLines, decoded, encoded
from torchembed.sharding.wire import WirePrecision, narrow_dtype


def exchange(
    tensor: Tensor,
    send: list[int],
    receive: list[int],
    group: dist.ProcessGroup | None,
    *,
    in_backward: bool = False,
) -> Tensor:
    """All-to-all along dim 0: ``send[r]`` rows go to rank r, ``receive[r]`` rows come from it."""
    received = tensor.new_empty(sum(receive), *tensor.shape[1:])
    tensor = tensor.contiguous()
    # In backward on the CPU the work object must outlive this call, as finished_work explains. A
    # collective on a GPU is waited for by the current stream, without a work object.
    keeps_work = in_backward and not tensor.is_cuda
    work = dist.all_to_all_single(received, tensor, receive, send, group=group, async_op=keeps_work)
    wait_for(work)
    return received


def exchange_sizes(sizes: Tensor, group: dist.ProcessGroup | None) -> list[list[int]]:
    """All-to-all of host integers: row r of ``sizes [W, n]`` goes to rank r.

    ``sizes`` is on the CPU, so that the host waits for no GPU. Returns a row from each rank.
    """
    received = torch.empty_like(sizes)
    dist.all_to_all_single(received, sizes, group=group)
    return received.tolist()


def gather_size(size: int, group: dist.ProcessGroup | None) -> list[int]:
    """All-gather of ``size`` through the CPU; none within :func:`replayed_sizes`."""
    return [of_rank for (of_rank,) in gather_numbers((size,), group)]


def gather_numbers(numbers: Sequence[int], group: dist.ProcessGroup | None) -> list[list[int]]:
    """All-gather of 64-bit integers, equally many on each rank, through the CPU; none within
    :func:`replayed_sizes`. Returns the ``numbers`` of each rank."""
    return _gathering.get()(tuple(numbers), group)


def _gather(numbers: tuple[int, ...], group: dist.ProcessGroup | None) -> list[list[int]]:
    mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    of_ranks = mine.new_empty(dist.get_world_size(group), len(numbers))
    dist.all_gather(list(of_ranks), mine, group=group)
    return of_ranks.tolist()


_Gather = Callable[[tuple[int, ...], dist.ProcessGroup | None], list[list[int]]]

# A context variable, not a global: a thread that reads ahead may gather sizes while another one
# captures a graph under a replay.
_gathering: ContextVar[_Gather] = ContextVar("gathering", default=_gather)
"""The gather of this thread: a collective, one that is recorded, or the replay of a record."""


class GatheredSize(NamedTuple):
    """An argument of :func:`gather_size` or :func:`gather_numbers`, and its result."""

    own: tuple[int, ...]
    of_ranks: list[list[int]]


@contextlib.contextmanager
def recorded_sizes() -> Iterator[list[GatheredSize]]:
    """Record the calls of :func:`gather_size` and :func:`gather_numbers` in this thread, in
    order; contexts around it, also of :func:`replayed_sizes`, go on."""
    recorded: list[GatheredSize] = []
    gather = _gathering.get()

    def gather_and_record(
        numbers: tuple[int, ...], group: dist.ProcessGroup | None
    ) -> list[list[int]]:
        recorded.append(GatheredSize(numbers, gather(numbers, group)))
        return recorded[-1].of_ranks

    with _gathering_by(gather_and_record):
        yield recorded


@contextlib.contextmanager
def replayed_sizes(recorded: Sequence[GatheredSize]) -> Iterator[None]:
    """Answer :func:`gather_size` and :func:`gather_numbers` in this thread from ``recorded``.

    No rank waits for another one. For code that asks for the same sizes in the same order as when
    they were recorded, on every rank: a CUDA graph cannot be captured around a collective of the
    host.

    Raises:
        RuntimeError: in these functions, where they are asked for other sizes.
    """
    left = iter(recorded)

    def replay(numbers: tuple[int, ...], group: dist.ProcessGroup | None) -> list[list[int]]:
        known = next(left, None)
        if known is None or known.own != numbers:
            there = "none is left" if known is None else f"{_listed(known.own)} comes next"
            raise RuntimeError(
                f"sizes must be asked for as before, got {_listed(numbers)}, where {there}"
            )
        return known.of_ranks

    with _gathering_by(replay):
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
    """The exchange of :func:`differentiable_exchange`."""

    @staticmethod
    def forward(
        ctx: FunctionContext,
        elements: Tensor,
        send: Sequence[SentLines],
        receive: Sequence[SentLines],
        group: dist.ProcessGroup | None,
        gradient_scale: float,
        wire: WirePrecision,
    ) -> Tensor:
        ctx.send, ctx.receive, ctx.group, ctx.scale = send, receive, group, gradient_scale
        ctx.wire = wire.backward
        return _exchange_lines(elements, send, receive, group, wire.forward)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad * ctx.scale
        inverse = None
        if ctx.wire is torch.float16 and grad.dtype is torch.float32:
            # Gradients are often too small for float16, which would flush them to zero.
            scale, inverse = float16_scale(grad, ctx.group)
            grad = grad * scale
        grad = _exchange_lines(grad, ctx.receive, ctx.send, ctx.group, ctx.wire, in_backward=True)
        return grad if inverse is None else grad * inverse, *[None] * 5


def _exchange_lines(
    elements: Tensor,
    send: Sequence[SentLines],
    receive: Sequence[SentLines],
    group: dist.ProcessGroup | None,
    wire: torch.dtype | None,
    *,
    in_backward: bool = False,
) -> Tensor:
    """:func:`exchange` of lines, sent in ``wire``; they arrive in their own dtype."""
    sent = narrow_dtype(elements.dtype, wire)
    if sent is torch.float8_e4m3fn:
        codes = exchange(
            encoded(elements, send),
            [lines.num_codes for lines in send],
            [lines.num_codes for lines in receive],
            group,
            in_backward=in_backward,
        )
        return decoded(codes, receive, elements.dtype)
    received = exchange(
        elements.to(sent),
        [lines.num_elements for lines in send],
        [lines.num_elements for lines in receive],
        group,
        in_backward=in_backward,
    )
    return received.to(elements.dtype)


def differentiable_exchange(
    elements: Tensor,
    send: Sequence[SentLines],
    receive: Sequence[SentLines],
    group: dist.ProcessGroup | None,
    gradient_scale: float,
    wire: WirePrecision,
) -> Tensor:
    """All-to-all of vectors whose backward sends gradients the other way, times ``gradient_scale``.

    Both are sent in the precision of ``wire`` and arrive in their own dtype.
    Where gradients are enabled the result requires one on every rank, so that all ranks take part
    in backward even where one has nothing to train.

    Args:
        elements: one-dimensional, the lines that ``send`` describes for each rank.
        receive: the lines that come from each rank.

    Returns:
        One-dimensional: the elements of these lines.
    """
    # Autograd would otherwise skip the backward of a rank without trained tables, and the other
    # ranks would wait for the collective in it.
    if torch.is_grad_enabled() and not elements.requires_grad:
        elements = elements.detach().requires_grad_()
    return _DifferentiableExchange.apply(elements, send, receive, group, gradient_scale, wire)
