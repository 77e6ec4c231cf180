"""Exchanges between the ranks of samples and those of table rows: ids go out, vectors come back."""

import abc
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchembed.core.function_context import FunctionContext
from torchembed.sharding.transport.collectives import exchange
from torchembed.sharding.transport.narrowing import float16_scale
from torchembed.sharding.transport.sent_lines import SentLines, decoded, encoded
from torchembed.sharding.wire import WirePrecision, narrow_dtype


class Sizes(NamedTuple):
    """How much goes out between ranks, in elements of dim 0; as much comes back."""

    sent: list[int]
    """From this rank's samples to each rank."""
    received: list[int]
    """From each rank's samples to this rank."""
    relayed: list[list[int]] | None = None
    """The sizes that this rank passes on, ``[node][place]``: from the rank of its own place in each
    node, to the rank at each place of its own node. None where all ranks send directly."""


class Lines(NamedTuple):
    """Lines of vectors that are exchanged."""

    sizes: Sizes
    """In lines."""
    widths: Sequence[tuple[int, ...]]
    """For each rank of rows, the elements of each vector of a line that it exchanges."""


class Announced(NamedTuple):
    """Integers that ranks have sent to each other."""

    received: list[list[int]]
    """The integers that each rank has sent to this one."""
    relayed: list[list[list[int]]] | None = None
    """The integers that this rank has passed on, ``[node][place]`` as in :attr:`Sizes.relayed`."""


class RankExchange(abc.ABC):
    """All-to-alls of tensors over the ranks that share tables.

    All ranks take part in each, in the same order; on a GPU the current stream waits, and not the
    host. What arrives is in the order of ranks, and has the bits that were sent.

    Args:
        group: of all the ranks; carries CPU tensors too.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)

    def to_all(self, of_samples: Sequence[int]) -> Sizes:
        """The sizes where rank r sends ``of_samples[r]`` to each rank."""
        return Sizes([of_samples[self.rank]] * len(of_samples), list(of_samples))

    def scaled(self, sizes: Sizes, of_rows: Sequence[int]) -> Sizes:
        """``sizes`` times ``of_rows[s]`` for what rank s gets, which has the rows."""
        sent = [count * size for count, size in zip(sizes.sent, of_rows, strict=True)]
        return Sizes(sent, [count * of_rows[self.rank] for count in sizes.received])

    @abc.abstractmethod
    def announce(self, numbers: Tensor, *, ahead: bool) -> Announced:
        """All-to-all of host integers: row r of ``numbers [W, n]``, on the CPU, goes to rank r.

        Args:
            ahead: True in the thread that exchanges sizes ahead of the step: its collectives have a
                group of their own, or they might be paired with those of forward.
        """

    @abc.abstractmethod
    def out(self, tensor: Tensor, sizes: Sizes, *, in_backward: bool = False) -> Tensor:
        """Send ``tensor [sum(sizes.sent), ...]`` to the ranks of rows."""

    @abc.abstractmethod
    def back(self, tensor: Tensor, sizes: Sizes, *, in_backward: bool = False) -> Tensor:
        """Send ``tensor [sum(sizes.received), ...]`` to the ranks of samples."""


class FlatExchange(RankExchange):
    """Each rank sends to each other one directly.

    Args:
        ahead: a group on the CPU of the same ranks, for a thread that exchanges sizes ahead.
    """

    def __init__(self, group: dist.ProcessGroup, ahead: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._ahead = ahead

    def announce(self, numbers: Tensor, *, ahead: bool) -> Announced:
        received = torch.empty_like(numbers)
        dist.all_to_all_single(received, numbers, group=self._ahead if ahead else self.group)
        return Announced(received.tolist())

    def out(self, tensor: Tensor, sizes: Sizes, *, in_backward: bool = False) -> Tensor:
        return exchange(tensor, sizes.sent, sizes.received, self.group, in_backward=in_backward)

    def back(self, tensor: Tensor, sizes: Sizes, *, in_backward: bool = False) -> Tensor:
        return exchange(tensor, sizes.received, sizes.sent, self.group, in_backward=in_backward)


class _DifferentiableExchange(torch.autograd.Function):
    """The exchanges of :func:`differentiable_out` and :func:`differentiable_back`."""

    @staticmethod
    def forward(
        ctx: FunctionContext,
        elements: Tensor,
        ranks: RankExchange,
        lines: Lines,
        goes_out: bool,
        gradient_scale: float,
        wire: WirePrecision,
    ) -> Tensor:
        ctx.ranks, ctx.lines, ctx.goes_out, ctx.scale = ranks, lines, goes_out, gradient_scale
        ctx.wire = wire.backward
        return _exchange_lines(elements, ranks, lines, goes_out, wire.forward)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad * ctx.scale
        inverse = None
        if ctx.wire is torch.float16 and grad.dtype is torch.float32:
            # Gradients are often too small for float16, which would flush them to zero.
            scale, inverse = float16_scale(grad, ctx.ranks.group)
            grad = grad * scale
        grad = _exchange_lines(
            grad, ctx.ranks, ctx.lines, not ctx.goes_out, ctx.wire, in_backward=True
        )
        return grad if inverse is None else grad * inverse, *[None] * 5


def _exchange_lines(
    elements: Tensor,
    ranks: RankExchange,
    lines: Lines,
    goes_out: bool,
    wire: torch.dtype | None,
    *,
    in_backward: bool = False,
) -> Tensor:
    """Send ``lines`` in ``wire``, out or back; they arrive in their own dtype."""
    send, sent = ranks.out if goes_out else ranks.back, narrow_dtype(elements.dtype, wire)
    if sent is torch.float8_e4m3fn:
        sizes, own = lines.sizes, lines.widths[ranks.rank]
        out = [SentLines(n, of_rank) for n, of_rank in zip(sizes.sent, lines.widths, strict=True)]
        back = [SentLines(n, own) for n in sizes.received]
        leaving, arriving = (out, back) if goes_out else (back, out)
        codes = ranks.scaled(sizes, [SentLines(1, of_rank).num_codes for of_rank in lines.widths])
        received = send(encoded(elements, leaving), codes, in_backward=in_backward)
        return decoded(received, arriving, elements.dtype)
    sizes = ranks.scaled(lines.sizes, [sum(of_rank) for of_rank in lines.widths])
    return send(elements.to(sent), sizes, in_backward=in_backward).to(elements.dtype)


def differentiable_out(
    elements: Tensor, ranks: RankExchange, lines: Lines, gradient_scale: float, wire: WirePrecision
) -> Tensor:
    """:meth:`RankExchange.out` of vectors whose backward sends gradients back, times
    ``gradient_scale``.

    Both are sent in the precision of ``wire`` and arrive in their own dtype.
    Where gradients are enabled the result requires one on every rank, so that all ranks take part
    in backward even where one has nothing to train.

    Args:
        elements: one-dimensional, the lines for each rank.

    Returns:
        One-dimensional: the elements of the lines from each rank.
    """
    return _differentiable(elements, ranks, lines, True, gradient_scale, wire)


def differentiable_back(
    elements: Tensor, ranks: RankExchange, lines: Lines, gradient_scale: float, wire: WirePrecision
) -> Tensor:
    """:meth:`RankExchange.back` of vectors whose backward sends gradients out; else as
    :func:`differentiable_out`."""
    return _differentiable(elements, ranks, lines, False, gradient_scale, wire)


def _differentiable(
    elements: Tensor,
    ranks: RankExchange,
    lines: Lines,
    goes_out: bool,
    gradient_scale: float,
    wire: WirePrecision,
) -> Tensor:
    # Autograd would otherwise skip the backward of a rank without trained tables, and the other
    # ranks would wait for the collective in it.
    if torch.is_grad_enabled() and not elements.requires_grad:
        elements = elements.detach().requires_grad_()
    return _DifferentiableExchange.apply(elements, ranks, lines, goes_out, gradient_scale, wire)
