"""Times of a GPU: of graphs, of single kernels, and of copies of memory."""

import statistics
from collections.abc import Callable, Sequence

import torch
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], object]


def copy_bytes_per_second(num_bytes: int = 2**31, num_copies: int = 10) -> float:
    """Measure a large copy within the GPU's memory: bytes read plus bytes written, a second."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = _seconds(lambda: [target.copy_(source) for _ in range(num_copies)])
    return 2 * num_bytes * num_copies / seconds


def _seconds(call: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def graph_microseconds(calls: Sequence[Call], num_rounds: int = 15) -> float:
    """The median microseconds of a call where each is a CUDA graph, over rounds of all of them.

    The calls should touch different memory, so that the cache holds nothing of the next one.
    """
    graphs = []
    for call in calls:
        call()  # compiles what is not compiled
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graphs.append(graph)

    def replay() -> None:
        for graph in graphs:
            graph.replay()

    replay()
    return statistics.median(_seconds(replay) for _ in range(num_rounds)) / len(graphs) * 1e6


def kernel_microseconds(calls: Sequence[Call], num_rounds: int = 3) -> dict[str, float]:
    """The mean microseconds that a call spends in each kernel, by the kernel's name; gaps between
    kernels do not count."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_rounds):
            for call in calls:
                call()
        torch.cuda.synchronize()
    num_calls = num_rounds * len(calls)
    return {
        event.key: event.self_device_time_total / num_calls
        for event in profiler.key_averages()
        if event.self_device_time_total > 0
    }
