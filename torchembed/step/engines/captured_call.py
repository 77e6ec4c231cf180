"""A call that is captured once and replayed: a CUDA graph, or, without a GPU, the call again."""

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from torchembed.sharding.transport.collectives import GatheredSize, replayed_sizes

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


class CapturedCall:
    """Captures ``call`` on construction, and repeats it by :meth:`replay`.

    On a CPU, which has no graphs, nothing runs on construction, and a replay calls again with what
    a captured call may rely on: the sizes that the ranks exchanged before.

    Args:
        call: a step. On a GPU it must not wait for the device, and allocates in ``pool``.
        sizes: what the ranks tell each other within it, in order, so that no rank is asked again;
            None, on a CPU alone, where they differ from step to step.
        stream: where the capture runs; None on a CPU.
        pool: of the memory of all captures that never run at once; None on a CPU.

    Raises:
        Exception: what ``call`` raises, or CUDA for what cannot be captured.
    """

    def __init__(
        self,
        call: Callable[[], None],
        sizes: Sequence[GatheredSize] | None,
        stream: torch.cuda.Stream | None,
        pool: "_POOL_HANDLE | None",
    ) -> None:
        self._call, self._sizes = call, sizes
        self._graph: torch.cuda.CUDAGraph | None = None
        if stream is not None:
            self._graph = _captured(self._run, stream, pool or torch.cuda.graph_pool_handle())

    def _run(self) -> None:
        with contextlib.nullcontext() if self._sizes is None else replayed_sizes(self._sizes):
            self._call()

    @property
    def calls_again(self) -> bool:
        """True where a replay runs the call's Python again: on a CPU."""
        return self._graph is None

    def replay(self) -> None:
        """Do what the captured call did, on what its memory holds now."""
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()

    def release(self) -> None:
        """Destroy the graph; no replay comes after it."""
        if self._graph is not None:
            self._graph.reset()


def _captured(
    call: Callable[[], None], stream: torch.cuda.Stream, pool: "_POOL_HANDLE"
) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    try:
        # Where a capture fails, the inner context leaves ``stream`` the current one.
        with torch.cuda.stream(stream), _capturing(graph, stream, pool):
            call()
    except BaseException:
        _clean_up(graph, stream, pool)
        raise
    return graph


def _capturing(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: "_POOL_HANDLE"
) -> torch.cuda.graph:
    # In the mode "global" calls of other threads, such as the one that sorts ids, would break the
    # capture.
    return torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")


_failed: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed, which torch's allocator of pinned memory goes on asking."""


def _clean_up(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: "_POOL_HANDLE") -> None:
    """Make memory be freed and random numbers be drawn as usual after a capture that failed.

    Where CUDA ends a capture with an error, torch goes no further. Its allocator then keeps each
    block that several streams have used, as during a capture; and its generator of the device
    raises at each draw, until another capture succeeds.
    """
    device = stream.device.index
    # Raises where the capture ended as it should, and ``call`` or the graph's making failed.
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
        _failed.append(graph)
    # NCCL destroys no communicator that a graph still uses.
    graph.reset()
    empty = torch.cuda.CUDAGraph()
    with _capturing(empty, stream, torch.cuda.graph_pool_handle()):
        torch.zeros(1, device=stream.device)  # torch warns of graphs without any work
