"""Times of a step's stages one after the other, as the planner's cost model counts them.

A captured step overlaps stages, and each then takes longer than alone.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from bench.step.timeline import stage_of

STAGES = (
    "ids",
    "exchange",
    "lookup",
    "dense forward",
    "dense backward",
    "mean",
    "row update",
    "dense update",
)
"""``ids``: their sort and their runs. ``mean``: of gradients over ranks."""
_OF_KIND = {
    "reduction over GPUs": "mean",
    "exchange between GPUs": "exchange",
    "ids: sort, find runs": "ids",
    "row update": "row update",
}
"""Kernels of one stage, whatever part of the step they are in, by what they are in
:mod:`bench.step.timeline`."""
_OF_PART = {
    "forward": "dense forward",
    "backward": "dense backward",
    "rows": "row update",
    "dense": "dense update",
}
"""The stage of the other kernels of a part."""
_PREFIX = "bench: "
_OF_ONE_RANK = ("dense forward", "dense backward")
"""Stages that are left out on several ranks."""
_WAITING = ("exchange", "mean")
"""Stages whose kernels wait for other ranks; on the rank that came last they did not."""

Parts = Mapping[str, Callable[[], object]]
"""The parts of a step in their order: ``forward``, ``backward``, ``rows`` and ``dense`` updates."""


def stage_milliseconds(parts: Parts, num_steps: int = 3) -> dict[str, float]:
    """The milliseconds of each stage's kernels in a step, of the slowest rank: a GPU runs nothing
    else meanwhile, but for the means, which begin under backward. On several ranks without the
    dense part's, among whose kernels are those that pack and unpack what is exchanged."""
    _run(parts, 1)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        _run(parts, num_steps)
    mine: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for stage, seconds in _kernels(trace):
        mine[stage].append(seconds)
    ranks = [mine]
    if dist.get_world_size() > 1:
        ranks = [mine] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
    found = {}
    for stage in STAGES:
        if len(ranks) > 1 and stage in _OF_ONE_RANK:
            continue
        of_ranks = [of_rank[stage] for of_rank in ranks]
        if stage in _WAITING:
            total = sum(min(times) for times in zip(*of_ranks, strict=True))
        else:
            total = max(sum(times) for times in of_ranks)
        found[stage] = 1e3 * total / num_steps
    return found


def _run(parts: Parts, num_steps: int) -> None:
    for _ in range(num_steps):
        for name, part in parts.items():
            with record_function(_PREFIX + name):
                part()
                torch.cuda.synchronize()


def _kernels(trace: profile) -> Iterator[tuple[str, float]]:
    """Stage and seconds of each kernel, in their order. It began in the part that launched it,
    since each part waits for its own."""
    events = trace.events() or ()
    on_host = [e for e in events if e.name.startswith(_PREFIX) and e.device_type.name == "CPU"]
    kernels = [e for e in events if e.device_type.name == "CUDA" and not e.is_user_annotation]
    for kernel in sorted(kernels, key=lambda event: event.time_range.start):
        span = kernel.time_range
        part = max(
            (e for e in on_host if e.time_range.start <= span.start),
            key=lambda e: e.time_range.start,
        ).name.removeprefix(_PREFIX)
        yield stage_of_kernel(kernel.name, part), (span.end - span.start) / 1e6


def stage_of_kernel(kernel: str, part: str) -> str:
    """The stage of a kernel of that name which a part of the step has launched."""
    kind = stage_of(kernel)
    if kind == "lookup":
        # In backward it says which gradient each id gets.
        return "lookup" if part == "forward" else "ids"
    return _OF_KIND.get(kind, _OF_PART[part])
