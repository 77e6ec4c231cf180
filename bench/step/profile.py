"""Profiles a step: kernels, launches and waits of the host, busy time of the GPU."""

import dataclasses
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bench.step.timeline import STAGES, stage_of

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls in which the host waits for the GPU."""
_STEPS = "bench: steps"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepProfile:
    """Means over some steps."""

    kernels: float
    """Kernels and copies that ran on the GPU."""
    launches: float
    """Calls by which the host started them; a graph is one."""
    host_waits: float
    gpu_busy_ms: float
    """Time in which at least one ran."""
    stage_ms: dict[str, float]
    """Time of all kernels of each stage of :mod:`bench.step.timeline`, also where they ran
    concurrently."""
    trace: profile

    def top_kernels(self, count: int) -> str:
        """A table of the kernels that took longest."""
        return self.trace.key_averages().table(
            sort_by="self_device_time_total", row_limit=count, max_name_column_width=60
        )


def profile_steps(step: Callable[[], object], num_steps: int) -> StepProfile:
    """Profile ``step`` on a GPU, ``num_steps`` times; it has run before."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        with record_function(_STEPS):
            for _ in range(num_steps):
                step()
        torch.cuda.synchronize()
    kernels = launches = waits = 0
    stages = dict.fromkeys(STAGES, 0.0)
    spans, events = [], trace.events() or ()
    ends = [e.time_range.end for e in events if e.name == _STEPS and e.device_type.name == "CPU"]
    for event in events:
        if event.device_type.name == "CUDA":
            if not event.is_user_annotation:
                kernels += 1
                start, end = event.time_range.start, event.time_range.end
                spans.append((start, end))
                stages[stage_of(event.name)] += (end - start) / 1e3 / num_steps
        elif event.name in WAITS:
            # Those that end the measurement, and the profiler's own, come after the steps.
            waits += event.time_range.start < max(ends)
        elif "Launch" in event.name and event.name.startswith("cu"):
            launches += 1
    return StepProfile(
        kernels=kernels / num_steps,
        launches=launches / num_steps,
        host_waits=waits / num_steps,
        gpu_busy_ms=_covered(spans) / 1e3 / num_steps,
        stage_ms=stages,
        trace=trace,
    )


def _covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of ``spans``."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total
