"""CUDA graphs whose capture may fail and leaves the process as it was."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


def captured_graph(
    call: Callable[[], None], stream: torch.cuda.Stream, pool: "_POOL_HANDLE | None" = None
) -> torch.cuda.CUDAGraph:
    """Capture the work of ``call()`` on a GPU as a graph.

    Where that fails, the current stream, the allocator and torch's generator of the device are left
    as after a capture that succeeds.

    Args:
        call: must not wait for the device.
        stream: where the capture runs, on the device.
        pool: of the graph's memory, which graphs that never run at once may share; its own by
            default.

    Raises:
        Exception: what ``call`` raises, or CUDA for what cannot be captured.
    """
    graph, pool = torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()
    try:
        # Where a capture fails, the inner context leaves ``stream`` the current one.
        with _nothing_collected(), torch.cuda.stream(stream), _capturing(graph, stream, pool):
            call()
    except BaseException:
        _clean_up(graph, stream, pool)
        raise
    # The capture has set the seed of its random numbers on its stream, and a replay sets its own.
    torch.cuda.current_stream(stream.device).wait_stream(stream)
    return graph


def _capturing(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: "_POOL_HANDLE"
) -> torch.cuda.graph:
    # In the mode "global" calls of other threads, such as those that read batches and sort ids,
    # would break the capture.
    return torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Keep Python from collecting garbage: a graph in it, which CUDA destroys, breaks a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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
