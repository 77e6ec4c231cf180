"""All-to-alls of tensors between ranks, and gathers of host integers."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchembed.sharding.transport.finished_work import wait_for


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
